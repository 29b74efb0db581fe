"""vLLM's `KVCacheManager` as the benchmark's peer, with the calls that its scheduler makes."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeAlias

import numpy as np
import torch
from manager_workloads import CACHE_TOKENS, MAX_ROW_TOKENS, Shape, StepTokens, Tokens
from numpy.typing import NDArray

VERSION = "0.33.0"
MAX_CHUNK_TOKENS = 8192
Ids: TypeAlias = NDArray[np.int32]


class Manager(Protocol):
    """What every system offers; `prepare`, `fill*`, `settle`, `punch_holes` are not timed."""

    name: str
    block_size: int

    def fill_rows(self, prompts: Sequence[Ids]) -> None:
        """Admit the prompts that `decode_step` goes on from."""

    def fill_cache(self) -> None:
        """Make the free blocks evictable cached ones, as on a server that has been up for a while."""

    def prepare(self, ids: Ids) -> object:
        """Return a prompt in the system's own currency, not hashed."""

    def decode_step(self, tokens: StepTokens) -> None:
        """Make place for one token of each row, evicting as needed."""

    def settle(self, tokens: StepTokens) -> None:
        """Do what an engine does after a step that is not the manager's."""

    def admit(self, prompt: object) -> tuple[int, int]:
        """Hash, look up, allocate, publish; return row and tokens found."""

    def finish(self, row: int) -> None:
        """Free a row; its blocks stay cached."""

    def hash_prompt(self, prompt: object) -> None:
        """Hash a prompt, where a system does so apart from its search."""

    def search(self, prompt: object) -> int:
        """Return how many tokens of a hashed prompt are found."""

    def punch_holes(self, ids: Ids, start: int, stop: int) -> None:
        """Drop the window blocks of a cached prompt's tokens `[start, stop)`."""

    def num_full_blocks(self) -> int:
        """Return how many blocks of full attention the rows hold."""


def fill_with_prompts(manager: Manager, num_cached: Callable[[], int]) -> None:
    """Admit and finish random prompts for as long as the cache grows."""
    # Another stream than the workloads' prompts.
    tokens, before = Tokens(seed=1), -1
    while num_cached() > before:
        before = num_cached()
        for _ in range(8):
            row, _ = manager.admit(manager.prepare(tokens.draw(MAX_CHUNK_TOKENS)))
            manager.finish(row)


@dataclass(frozen=True)
class VllmModules:
    """The modules of vLLM in use."""

    manager: ModuleType
    utils: ModuleType
    interface: ModuleType
    request: ModuleType
    hashing: ModuleType
    sampling: ModuleType


def import_vllm(folder: Path) -> VllmModules:
    """Import vLLM's manager from a folder that `make_peer_env.py` made.

    Raises: ImportError if vLLM or what it imports is missing or of another version.
    """
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Last, so that torch, numpy and the like are those of this environment.
    sys.path.append(str(folder.resolve()))
    import vllm
    import vllm.sampling_params as sampling
    import vllm.utils.hashing as hashing
    import vllm.v1.core.kv_cache_manager as manager
    import vllm.v1.core.kv_cache_utils as utils
    import vllm.v1.kv_cache_interface as interface
    import vllm.v1.request as request

    if vllm.__version__ != VERSION:
        raise ImportError(f"vllm: got version {vllm.__version__}, expected {VERSION}")
    utils.init_none_hash(hashing.sha256)
    return VllmModules(manager, utils, interface, request, hashing, sampling)


class VllmManager:
    """A decode step is, per request: allocate, list the new ids for the worker, append the token (which may hash)."""

    name = "vLLM"

    def __init__(self, modules: VllmModules, shape: Shape, num_rows: int) -> None:
        self.shape, self._modules, self.block_size = shape, modules, shape.block_size
        specs = self._specs(modules.interface)
        groups = [modules.interface.KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        config = modules.interface.KVCacheConfig(self._num_blocks(num_rows), [], groups)
        self.manager = modules.manager.KVCacheManager(
            config,
            max_model_len=131072,
            scheduler_block_size=shape.block_size,
            hash_block_size=shape.block_size,
            max_in_flight_tokens=MAX_CHUNK_TOKENS,
        )
        self._hasher = modules.utils.get_request_block_hasher(shape.block_size, modules.hashing.sha256)
        self._sampling = modules.sampling.SamplingParams(max_tokens=65536)
        self._num_requests = 0
        self._requests: dict[int, object] = {}
        self._decoding: list[object] = []

    def _specs(self, interface: ModuleType) -> list[object]:
        shape = self.shape
        common = {"block_size": shape.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
        states = {"shapes": ((2 * shape.block_size,),), "dtypes": (torch.bfloat16,), "mamba_cache_mode": "align"}
        return [
            interface.FullAttentionSpec(**common),
            *(
                interface.SlidingWindowSpec(**common, sliding_window=shape.window)
                for _ in range(shape.num_window_groups)
            ),
            *(interface.MambaSpec(block_size=shape.block_size, **states) for _ in range(shape.num_state_groups)),
        ]

    def _num_blocks(self, num_rows: int) -> int:
        """Return blocks for the rows, for one prompt on its way in, for the cache."""
        shape = self.shape
        num_full = MAX_ROW_TOKENS // shape.block_size + 1
        num_window = 0 if shape.window is None else shape.window // shape.block_size + 2
        per_row = num_full + shape.num_window_groups * num_window + shape.num_state_groups * 3
        num_cached = (CACHE_TOKENS + 2 * MAX_CHUNK_TOKENS) // shape.block_size
        return num_rows * per_row + num_cached * shape.num_groups

    def fill_rows(self, prompts: Sequence[Ids]) -> None:
        """Admit prompts with one output token each, which comes next."""
        for prompt in prompts:
            row, _ = self.admit(self.prepare(prompt))
            self._requests[row].append_output_token_ids(0)
            self._decoding.append(self._requests[row])

    def fill_cache(self) -> None:
        """Run prompts through until no more blocks become cached."""
        fill_with_prompts(self, self._num_cached)

    def _num_cached(self) -> int:
        return sum(block.block_hash is not None for block in self.manager.block_pool.blocks)

    def prepare(self, ids: Ids) -> object:
        """Make a request without hashes."""
        self._num_requests += 1
        request = self._modules.request.Request(str(self._num_requests), ids.tolist(), self._sampling, None)
        request._block_hasher = self._hasher
        return request

    def decode_step(self, tokens: StepTokens) -> None:
        """Allocate a slot of each request, one after the other, then append what they computed."""
        manager = self.manager
        manager.new_step_starts()
        for request in self._decoding:
            blocks = manager.allocate_slots(request, 1)
            if blocks is None:
                raise RuntimeError("vLLM: out of blocks in a decode step")
            blocks.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
        for request, token in zip(self._decoding, tokens.as_list, strict=True):
            request.append_output_token_ids(token)

    def settle(self, tokens: StepTokens) -> None:
        """Do nothing: the step has done it all."""

    def admit(self, prompt: object) -> tuple[int, int]:
        """Hash, look up, allocate in chunks."""
        manager, request = self.manager, prompt
        manager.new_step_starts()
        request.update_block_hashes()
        blocks, num_hit, _ = manager.get_computed_blocks(request)
        self._allocate(request, self._next_chunk(request, num_hit), num_hit, blocks)
        request.num_computed_tokens += num_hit
        while request.num_computed_tokens < request.num_tokens:
            manager.new_step_starts()
            self._allocate(request, self._next_chunk(request, request.num_computed_tokens), 0, None)
        row = int(request.request_id)
        self._requests[row] = request
        return row, num_hit

    def _next_chunk(self, request: object, num_computed: int) -> int:
        stop = min(num_computed + MAX_CHUNK_TOKENS, request.num_tokens)
        # A state is cached at the end of a chunk, so that the scheduler ends chunks at block boundaries.
        aligned = stop // self.shape.block_size * self.shape.block_size
        return (aligned if self.shape.num_state_groups and aligned > num_computed else stop) - num_computed

    def _allocate(self, request: object, num_new: int, num_hit: int, blocks: object) -> None:
        new_blocks = self.manager.allocate_slots(
            request, num_new, num_new_computed_tokens=num_hit, new_computed_blocks=blocks
        )
        if new_blocks is None:
            raise RuntimeError(f"vLLM: out of blocks for {num_new} tokens")
        new_blocks.get_block_ids(allow_none=True)
        request.num_computed_tokens += num_new

    def finish(self, row: int) -> None:
        """Free the request's blocks."""
        self.manager.free(self._requests.pop(row))

    def hash_prompt(self, prompt: object) -> None:
        """Hash all blocks."""
        prompt.block_hashes.clear()
        prompt.update_block_hashes()

    def search(self, prompt: object) -> int:
        """Look up the hashes."""
        return self.manager.get_computed_blocks(prompt)[1]

    def punch_holes(self, ids: Ids, start: int, stop: int) -> None:
        """Cache a prompt that starts alike, then the whole one, then evict the window blocks of `[start, stop)`."""
        for num_tokens in (start, len(ids)):
            prompt = self.prepare(ids[:num_tokens])
            row, _ = self.admit(prompt)
            self.finish(row)
        pool, block_size = self.manager.block_pool, self.shape.block_size
        evicted = set()
        for block_hash in prompt.block_hashes[start // block_size : stop // block_size]:
            for group in range(1, 1 + self.shape.num_window_groups):
                evicted.update(block.block_id for block in pool.get_cached_block(block_hash, [group]) or ())
        self.manager.evict_blocks(evicted)

    def num_full_blocks(self) -> int:
        """Count the rows' blocks in the first group."""
        return sum(len(self.manager.get_block_ids(str(row))[0]) for row in self._requests)
