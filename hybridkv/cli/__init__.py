"""The command line: it imports torch only once a command needs it."""
