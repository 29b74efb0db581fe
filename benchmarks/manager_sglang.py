"""SGLang's `UnifiedRadixCache` with its allocators as the benchmark's peer, with the calls that its scheduler makes.

Its Triton kernels need a GPU; on a CPU its platform layer picks its own torch versions of them, which makes its
allocation slower than on a GPU: compare with that in mind.
"""

import importlib.machinery
import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
from manager_peers import MAX_CHUNK_TOKENS, Ids, fill_with_prompts
from manager_workloads import BLOCK_SIZE, CACHE_TOKENS, MAX_ROW_TOKENS, NUM_ROWS, Shape, StepTokens

VERSION = "0.5.23"
# SGLang frees what leaves a window once 128 tokens have.
_WINDOW_SLACK = 256
_NUM_CACHED_STATES = 64
_STUBBED = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io")


class _Stub(ModuleType):
    """A package of which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@dataclass(frozen=True)
class SglangModules:
    """The modules of SGLang in use."""

    allocation: ModuleType
    allocators: ModuleType
    swa_allocator: ModuleType
    base: ModuleType
    cache: ModuleType
    common: ModuleType
    components: ModuleType
    forward: ModuleType
    params: ModuleType
    pool: ModuleType
    radix: ModuleType
    sampling: ModuleType
    schedule: ModuleType
    states: ModuleType
    swa_pool: ModuleType
    tokens: ModuleType


def import_sglang(folder: Path) -> SglangModules:
    """Import SGLang's cache from a folder that `make_peer_env.py` made.

    Raises: ImportError if SGLang or what it imports is missing or of another version.
    """
    # The Rust core comes compiled with the wheel.
    os.environ["SGLANG_RUST_BUILD_MODE"] = "never"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.append(str(folder.resolve()))
    # Before the stub: transformers looks once for a torchvision to use.
    import transformers

    del transformers
    # Imported by model configs for image transforms; nothing here calls it.
    for name in _STUBBED:
        if name not in sys.modules:
            sys.modules[name] = _Stub(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    from importlib.metadata import version

    import sglang.srt.configs.mamba_utils as states
    import sglang.srt.managers.schedule_batch as schedule
    import sglang.srt.mem_cache.allocation as allocation
    import sglang.srt.mem_cache.allocator.paged as allocators
    import sglang.srt.mem_cache.allocator.swa as swa_allocator
    import sglang.srt.mem_cache.allocator.token as tokens
    import sglang.srt.mem_cache.base_prefix_cache as base
    import sglang.srt.mem_cache.cache_init_params as params
    import sglang.srt.mem_cache.common as common
    import sglang.srt.mem_cache.memory_pool as pool
    import sglang.srt.mem_cache.radix_cache as radix
    import sglang.srt.mem_cache.swa_memory_pool as swa_pool
    import sglang.srt.mem_cache.unified_cache.component_type as components
    import sglang.srt.mem_cache.unified_radix_cache as cache
    import sglang.srt.model_executor.forward_batch_info as forward
    import sglang.srt.sampling.sampling_params as sampling
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    if version("sglang") != VERSION:
        raise ImportError(f"sglang: got version {version('sglang')}, expected {VERSION}")
    arguments = ServerArgs(model_path="dummy", device="cpu", page_size=BLOCK_SIZE, attention_backend="torch_native")
    # There is no model to read it from.
    arguments._mamba_cache_chunk_size = 64
    publish(arguments, role="tokenizer")
    return SglangModules(
        allocation=allocation,
        allocators=allocators,
        swa_allocator=swa_allocator,
        base=base,
        cache=cache,
        common=common,
        components=components,
        forward=forward,
        params=params,
        pool=pool,
        radix=radix,
        sampling=sampling,
        schedule=schedule,
        states=states,
        swa_pool=swa_pool,
        tokens=tokens,
    )


@dataclass(frozen=True)
class _Model:
    """What allocation reads of a model's config."""

    is_encoder_decoder: bool = False


class SglangManager:
    """A decode step is one call for the batch, with a loop over its requests inside for windows.

    `core` is "rust" or "python": in what its prefix tree is written.
    """

    def __init__(self, modules: SglangModules, shape: Shape, num_rows: int, *, core: str) -> None:
        self.name = f"SGLang, {core.capitalize()} core"
        self.shape, self._modules = shape, modules
        # Without extra buffers for states SGLang takes pages of one token only.
        self.block_size = 1 if shape.num_state_groups else BLOCK_SIZE
        self._rows = self._make_rows(num_rows)
        self.allocator = self._make_allocator(num_rows)
        types = modules.components.ComponentType
        second = (types.SWA,) if shape.window is not None else (types.MAMBA,) if shape.num_state_groups else ()
        self.tree = modules.cache.UnifiedRadixCache(
            modules.params.CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.block_size,
                sliding_window_size=shape.window,
                tree_components=(types.FULL, *second),
                tree_core_backend=core,
            )
        )
        got = type(self.tree.tree_core).__name__
        if got.startswith("Rust") != (core == "rust"):
            raise ImportError(f"sglang: got the tree core {got}, expected the {core} one")
        self._sampling = modules.sampling.SamplingParams(temperature=0, max_new_tokens=65536)
        self._num_requests = 0
        self._requests: dict[int, object] = {}
        self._batch: object = None

    def _make_rows(self, num_rows: int) -> object:
        modules = self._modules
        sizes = {"size": NUM_ROWS + 1, "max_context_len": 4 * MAX_ROW_TOKENS, "device": "cpu"}
        if not self.shape.num_state_groups:
            return modules.pool.ReqToTokenPool(**sizes, enable_memory_saver=False)
        # The smallest state there is: nothing here computes one.
        shape = modules.states.Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=4,
            n_groups=1,
            num_heads=1,
            head_dim=4,
            state_size=4,
            conv_kernel=2,
        )
        return modules.pool.HybridReqToTokenPool(
            **sizes,
            enable_memory_saver=False,
            # One of the row, one in the tree.
            mamba_size=2 * num_rows + _NUM_CACHED_STATES,
            mamba_spec_state_size=NUM_ROWS,
            cache_params=modules.states.Mamba2CacheParams(shape=shape, layers=[1]),
            mamba_layer_ids=[1],
            enable_mamba_extra_buffer=False,
        )

    def _make_allocator(self, num_rows: int) -> object:
        modules, window = self._modules, self.shape.window
        # Room for the rows, for prompts on their way in, for the cache.
        room = CACHE_TOKENS + 2 * MAX_CHUNK_TOKENS
        size = num_rows * MAX_ROW_TOKENS + room
        sizes = {"page_size": self.block_size, "dtype": torch.float16, "device": "cpu"}
        heads = {"head_num": 1, "head_dim": 1}
        if self.shape.num_state_groups:
            states = {"full_attention_layer_ids": [0], "mamba_pool": self._rows.mamba_pool}
            pool = modules.pool.HybridLinearKVPool(size, **sizes, **heads, **states, enable_memory_saver=False)
            return modules.tokens.TokenToKVPoolAllocator(size, torch.float16, "cpu", pool, need_sort=False)
        if window is None:
            pool = modules.pool.MHATokenToKVPool(size, **sizes, **heads, layer_num=1, enable_memory_saver=False)
            return modules.allocators.PagedTokenToKVPoolAllocator(size, **sizes, kvcache=pool, need_sort=False)
        size_swa = num_rows * (window + _WINDOW_SLACK) + room
        layers = {"swa_attention_layer_ids": [1], "full_attention_layer_ids": [0]}
        pool = modules.swa_pool.SWAKVPool(size, size_swa, **sizes, **heads, **layers)
        return modules.swa_allocator.SWATokenToKVPoolAllocator(size, size_swa, **sizes, kvcache=pool, need_sort=False)

    def fill_rows(self, prompts: Sequence[Ids]) -> None:
        """Admit prompts with one output token each, then make the batch of them."""
        for prompt in prompts:
            row, _ = self.admit(self.prepare(prompt))
            self._requests[row].output_ids.append(0)
        requests = list(self._requests.values())
        lengths = torch.tensor([request.kv.kv_allocated_len for request in requests])
        rows = torch.tensor([request.kv.req_pool_idx for request in requests])
        self._batch = self._make_batch(requests, rows, lengths, self._modules.forward.ForwardMode.DECODE)

    def _make_batch(self, requests: list[object], rows: torch.Tensor, lengths: torch.Tensor, mode: object) -> object:
        return self._modules.schedule.ScheduleBatch(
            reqs=requests,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            model_config=_Model(),
            device="cpu",
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            forward_mode=mode,
        )

    def fill_cache(self) -> None:
        """Run prompts through until the tree no longer grows."""
        fill_with_prompts(self, self.tree.full_evictable_size)

    def prepare(self, ids: Ids) -> object:
        """Make a request."""
        self._num_requests += 1
        tokens = array("q", ids.astype("int64").tobytes())
        request = self._modules.schedule.Req(str(self._num_requests), "", tokens, self._sampling)
        request.refresh_fill_ids()
        return request

    def decode_step(self, _tokens: StepTokens) -> None:
        """Allocate for the batch, advance its lengths; its loop that counts the step is in `settle`, not timed."""
        batch = self._batch
        self._modules.allocation.alloc_for_decode(batch, token_per_req=1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1

    def settle(self, tokens: StepTokens) -> None:
        """Append what the requests computed; SGLang hashes nothing."""
        for request, token in zip(self._batch.reqs, tokens.as_list, strict=True):
            request.decode_batch_idx += 1
            request.output_ids.append(token)

    def admit(self, prompt: object) -> tuple[int, int]:
        """Look up, lock, allocate, publish what is computed; in chunks."""
        num_hit = self._match(prompt)
        while prompt.prefix_len < prompt.seqlen:
            self._allocate(prompt, MAX_CHUNK_TOKENS)
            self._modules.common.checkpoint_kv_cache(prompt, self.tree)
        row = prompt.kv.req_pool_idx
        self._requests[row] = prompt
        return row, num_hit

    def _match(self, request: object) -> int:
        request.init_next_round_input(self.tree)
        request.lock = self.tree.lock(request.last_node)
        return request.prefix_len

    def _allocate(self, request: object, num_tokens: int) -> None:
        request.extend_end = min(request.prefix_len + num_tokens, request.seqlen)
        length = torch.tensor([request.extend_end])
        batch = self._make_batch([request], None, length, self._modules.forward.ForwardMode.EXTEND)
        batch.prefix_lens, batch.extend_lens = [request.prefix_len], [request.extend_len]
        batch.extend_num_tokens = request.extend_len
        self._modules.allocation.alloc_for_extend(batch)

    def finish(self, row: int) -> None:
        """Hand the row's tokens to the tree, free the rest."""
        request = self._requests.pop(row)
        request.finished_reason = self._modules.schedule.FINISH_LENGTH(length=0)
        self._modules.common.release_kv_cache(request, self.tree, checkpoint=True)

    def hash_prompt(self, prompt: object) -> None:
        """Do nothing: the tree compares tokens."""

    def search(self, prompt: object) -> int:
        """Match all but the last token against the tree."""
        key = self._modules.radix.RadixKey(prompt.origin_input_ids, limit=prompt.seqlen - 1)
        return self.tree.match_prefix(self._modules.base.MatchPrefixParams(key=key)).device_prefix_len

    def punch_holes(self, ids: Ids, start: int, stop: int) -> None:
        """Cache a prompt that starts alike, then insert the whole one with its window freed in `[start, stop)`."""
        row, _ = self.admit(self.prepare(ids[:start]))
        self.finish(row)
        request = self.prepare(ids)
        self._match(request)
        self._allocate(request, len(ids))
        row = request.kv.req_pool_idx
        self.allocator.free_swa_segment(self._rows.req_to_token[row, start:stop], start_pos=start)
        request.kv.set_evicted_seqlen(self._modules.components.ComponentType.SWA, stop)
        self._requests[row] = request
        self.finish(row)

    def num_full_blocks(self) -> int:
        """Count the pages of the rows' tokens."""
        return sum(-(-request.kv.kv_allocated_len // self.block_size) for request in self._requests.values())
