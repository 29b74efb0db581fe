"""Logits become token ids."""

from collections.abc import Sequence as Seq

from hybridkv._torch import torch
from hybridkv.runner.sequence import Sequence


class Sampler:
    """Greedy or sampled decoding, with a random stream of its own for every sequence."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: dict[tuple[int, int], torch.Generator] = {}

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
        """Return one token per sequence.

        A seeded sequence's tokens do not depend on its neighbours in the batch.

        Shapes: logits [len(sequences), vocab_size]
        """
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for position, sequence in enumerate(sequences):
            if sequence.params.temperature > 0:
                tokens[position] = self._draw(logits[position].float(), sequence)
        return tokens

    def forget(self, sequence: Sequence) -> None:
        """Drop a finished sequence's random stream."""
        self._generators.pop(_key(sequence), None)

    def _draw(self, logits: torch.Tensor, sequence: Sequence) -> int:
        params = sequence.params
        logits = logits / params.temperature
        if 0 < params.top_k < logits.numel():
            threshold = logits.topk(params.top_k).values[-1]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if params.top_p < 1:
            ranked, order = probabilities.sort(descending=True)
            # A token stays while the tokens before it do not reach top_p yet; the first always stays.
            kept = ranked.cumsum(dim=-1) - ranked < params.top_p
            probabilities = torch.zeros_like(probabilities).scatter(0, order, ranked * kept)
        return int(torch.multinomial(probabilities, 1, generator=self._generator(sequence)))

    def _generator(self, sequence: Sequence) -> torch.Generator:
        generator = self._generators.get(_key(sequence))
        if generator is None:
            generator = torch.Generator(self._device)
            if sequence.params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(sequence.params.seed)
            self._generators[_key(sequence)] = generator
        return generator


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.request_idx, sequence.choice_idx
