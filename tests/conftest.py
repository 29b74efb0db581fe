"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before any kernel is imported."""

import importlib.util
import os

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
