"""One layer's recurrences over the packed batch, in the argument conventions of transformers.

Each method stands in for a function of a modeling file: it takes the batch `[1, T, ...]`, starts every row from the
layer's cached state, writes the states back and returns outputs of the same form.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hybridkv._torch import torch
from hybridkv.errors import InvariantError, UnsupportedModel
from hybridkv.runner.caches import ForwardStep
from hybridkv_kernels.causal_conv1d import Activation, causal_conv1d, causal_conv1d_torch
from hybridkv_kernels.gated_delta_rule import DeltaRuleParams, gated_delta_rule, gated_delta_rule_torch
from hybridkv_kernels.lightning_attention import lightning_attention, lightning_attention_torch
from hybridkv_kernels.mamba2_scan import Mamba2Params, mamba2_scan, mamba2_scan_torch
from hybridkv_kernels.rg_lru import rg_lru, rg_lru_torch
from hybridkv_kernels.selective_scan import ScanInputs, SelectiveScanParams, selective_scan, selective_scan_torch
from hybridkv_kernels.state_batch import StateBatch

_ACTIVATIONS: dict[str | None, Activation] = {None: None, "silu": "silu", "swish": "silu"}


class LayerRecurrence:
    """The state of one layer during one forward pass.

    Its methods raise UnsupportedModel, naming the layer, if what the module makes does not fit the states.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._step: ForwardStep | None = None
        self._head = 0
        self._has_run = False

    def begin(self, step: ForwardStep) -> None:
        """Use the states of a step."""
        self._step = step
        self._has_run = False

    def end(self) -> None:
        """Forget the step."""
        self._step = None

    def restart(self) -> None:
        """Begin a forward of the layer's module.

        Raises: UnsupportedModel if it is the second of a step, which would advance the states twice.
        """
        if self._has_run:
            raise UnsupportedModel(
                f"layer {self.layer}: its recurrent module was called twice in one forward pass, which would advance "
                "its state twice; only models that call it once can be run"
            )
        self._has_run = True
        self._head = 0

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_ignored: object,
    ) -> torch.Tensor:
        """Causal convolution; hidden_states [1, C, T], as returned; weight [C, K]."""
        if activation not in _ACTIVATIONS:
            raise UnsupportedModel(f"layer {self.layer}: convolves with activation {activation!r}, known: silu")
        x = hidden_states[0].transpose(0, 1).contiguous()
        out = torch.zeros_like(x)
        op = causal_conv1d if x.is_cuda else causal_conv1d_torch
        with self._state("conv") as (state, batch):
            op(x, weight, bias, activation=_ACTIVATIONS[activation], state=state, batch=batch, out=out)
        return out.transpose(0, 1)[None]

    def mamba2_scan(  # noqa: PLR0913 - the signature is transformers'
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_ignored: object,
    ) -> torch.Tensor:
        """Mamba-2 scan; hidden_states [1, T, H, P], as returned; dt [1, T, H], B and C [1, T, G, N].

        transformers limits dt in its scan and not in its single step, so a generated token's dt is not limited.
        """
        del chunk_size
        steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        steps = torch.nn.functional.softplus(steps) if dt_softplus else steps
        steps = torch.where(self._generated()[:, None], steps, steps.clamp(*dt_limit))
        x = hidden_states[0]
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        op = mamba2_scan if x.is_cuda else mamba2_scan_torch
        params = Mamba2Params(A, D, dt_softplus=False)
        with self._state("ssm") as (state, batch):
            op(x, steps, B[0], C[0], params, state=state, batch=batch, out=out)
        return out[None]

    def selective_scan(  # noqa: PLR0913 - the signature is transformers'
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_ignored: object,
    ) -> torch.Tensor:
        """Mamba-1 scan; hidden_states, dt and z [1, C, T], as returned; B and C [1, N, T].

        A model with several Mamba heads calls it once a head, in order.
        """
        x, steps, B_rows, C_rows = (_tokens_first(tensor) for tensor in (hidden_states, dt, B, C))
        out = torch.zeros_like(x)
        inputs = ScanInputs(x, steps, B_rows, C_rows, None if z is None else _tokens_first(z))
        params = SelectiveScanParams(A[None].contiguous(), _one_head(D), _one_head(delta_bias), delta_softplus)
        op = selective_scan if x.is_cuda else selective_scan_torch
        with self._state("ssm") as (state, batch):
            if state.dim() == 4:  # [num_blocks, heads, P, N]
                state = state[:, self._head : self._head + 1]
                self._head += 1
            else:
                state = state[:, None]
            op(inputs, params, state=state, batch=batch, out=out)
        return out[:, 0].transpose(0, 1)[None]

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_ignored: object,
    ) -> tuple[torch.Tensor, None]:
        """Gated delta rule or KDA.

        Shapes: query and key [1, T, Hk, Dk], value [1, T, Hv, Dv], as returned; g [1, T, Hv] or [1, T, Hv, Dk]; beta
            [1, T, Hv]
        """
        q, k, v, decay, rate = (tensor[0].contiguous() for tensor in (query, key, value, g, beta))
        out = torch.zeros_like(v)
        params = DeltaRuleParams(q.shape[-1] ** -0.5, l2_normalize=use_qk_l2norm_in_kernel)
        op = gated_delta_rule if q.is_cuda else gated_delta_rule_torch
        with self._state("recurrent") as (state, batch):
            op(q, k, v, decay, rate, params, state=state, batch=batch, out=out)
        return out[None], None

    def lightning(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        """Lightning attention; query, key and value [1, T, H, D], slope [H]; returns [1, T, H, D]."""
        q, k, v = (tensor[0].contiguous() for tensor in (query, key, value))
        out = torch.zeros_like(v)
        op = lightning_attention if q.is_cuda else lightning_attention_torch
        with self._state("recurrent") as (state, batch):
            op(q, k, v, slope, state=state, batch=batch, out=out)
        return out[None]

    def rg_lru(self, decay: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gated linear recurrence; decay and hidden_states [1, T, W], as returned."""
        x = hidden_states[0].contiguous()
        out = torch.zeros_like(x)
        op = rg_lru if x.is_cuda else rg_lru_torch
        with self._state("recurrent") as (state, batch):
            op(decay[0].contiguous(), x, state=state, batch=batch, out=out)
        return out[None]

    @contextmanager
    def _state(self, name: str) -> Iterator[tuple[torch.Tensor, StateBatch]]:
        """Give an op one of the layer's states with the rows that advance it; its ValueError gets the layer's name."""
        try:
            yield self._current().state(self.layer, name)
        except ValueError as error:
            raise UnsupportedModel(
                f"layer {self.layer}: state {name!r} does not fit what its module makes: {error}; make the spec from "
                "the model's own config, for one rank"
            ) from error

    def _generated(self) -> torch.Tensor:
        generated = self._current().generated
        assert generated is not None  # a step with states says which tokens were generated
        return generated

    def _current(self) -> ForwardStep:
        if self._step is None:
            raise InvariantError(f"layer {self.layer}: recurs outside a step")
        return self._step


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[1, C, T]` as `[T, 1, C]`, one head."""
    return tensor[0].transpose(0, 1).contiguous()[:, None]


def _one_head(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight[None].contiguous()
