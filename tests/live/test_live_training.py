"""Training an attached model: loops, accumulation, autocast, checkpointing, and what else people put on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import live_toys
import pytest
import torch
import transformers
from live_helpers import Pair, assert_close, perturb, worst
from live_transformers import DECODERS, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import resfx

FORM = resfx.DeltaAttention()


def losses(model: nn.Module, steps: int, accumulate: int = 1) -> list[float]:
    """Train on a fixed task; the loss of every step."""
    optimizer = torch.optim.AdamW(resfx.parameter_groups(model, lr=1e-2))
    found = []
    model.train()
    for step in range(steps):
        for part in range(accumulate):
            x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step * accumulate + part))
            loss = (model(x) - x[..., :3].roll(1, 1)).square().mean() / accumulate
            loss.backward()
        found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_twenty_steps_as_the_static_rewrite(accumulate: int) -> None:
    pair = Pair(live_toys.model, FORM, (live_toys.inputs(),), std=0.1)
    mine, theirs = losses(pair.live, 20, accumulate), losses(pair.static, 20, accumulate)
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert mine[-1] < mine[0]
    assert mine != pytest.approx(losses(pair.plain, 20, accumulate), rel=1e-4)


def test_train_and_eval_modes() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = live_toys.model()
        for layer in model.stack.layers:
            layer.a = nn.Sequential(layer.a, nn.Dropout(0.5))  # type: ignore[operator]
        return model.eval()

    pair = Pair(make, FORM, (live_toys.inputs(),))
    pair.assert_same(live_toys.inputs())
    for model in (pair.live, pair.static):
        model.train()
    outputs = []
    for model in (pair.live, pair.static):
        torch.manual_seed(5)
        outputs.append(model(live_toys.inputs()))
    assert_close([outputs[0]], [outputs[1]])
    assert worst([outputs[0]], [pair.live.eval()(live_toys.inputs())]) > 1e-3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast(backend: str) -> None:
    pair = Pair(live_toys.model, FORM, (live_toys.inputs(),), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair.assert_same(live_toys.inputs(), gradients=False, tolerance=1e-5)
        assert pair.live(live_toys.inputs()).dtype == torch.bfloat16


class Checkpointed(live_toys.Stack):
    """Recomputes each of its layers in the backward pass."""

    def forward(self, x: torch.Tensor, states: bool = False) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x)


def test_checkpointed_layers_are_rewritten_and_still_recomputed() -> None:
    """The form reads across the regions' borders; the partitioner still sees what to recompute."""
    marked: list[int] = []

    def looking(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        regions = {node.meta["ac_graph_id"] for node in graph.graph.nodes if "recompute" in node.meta}
        marked.append(len(regions))
        return graph.forward

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed().eval()

    pair = Pair(make, FORM, (live_toys.inputs(),), backend=looking)
    pair.assert_same(live_toys.inputs())
    assert marked == [2]


def test_a_library_switches_checkpointing_on_after_attach() -> None:
    """gradient_checkpointing_enable of a transformers model, in train mode."""
    ids = tokens()
    pair = Pair(DECODERS["llama"], FORM, (), {"input_ids": ids}, std=0.3)
    before = pair.live.train()(input_ids=ids).logits
    pair.live.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    after = pair.live(input_ids=ids).logits
    assert_close([after], [before])
    for model, logits in ((pair.live, after), (pair.static, pair.static(input_ids=ids).logits)):
        (logits * torch.arange(logits.shape[-1])).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    theirs = dict(pair.static.named_parameters())
    for name, parameter in pair.live.named_parameters():
        assert_close([parameter.grad], [theirs[name].grad])  # type: ignore[list-item]


class Frozen(live_toys.Stack):
    """Runs its lower half with gradients off; `counted` writes to a buffer there."""

    def __init__(self, counted: bool) -> None:
        super().__init__(depth=4)
        self.register_buffer("mean", torch.zeros(8))
        self.counted = counted

    def forward(self, x: torch.Tensor, states: bool = False) -> Any:
        with torch.no_grad():
            x = self.layers[1](self.layers[0](x))
            if self.counted:
                self.mean.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)  # type: ignore[operator]
        return self.norm(self.layers[3](self.layers[2](x)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sites_with_gradients_off_learn_as_in_the_static_rewrite(backend: str) -> None:
    """The model's own parameters there learn nothing."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Frozen(counted=False).eval()

    pair = Pair(make, FORM, (live_toys.inputs(),), backend=backend)
    pair.assert_same(live_toys.inputs())
    pair.live(live_toys.inputs()).square().sum().backward()
    graded = {name for name, p in pair.live.named_parameters() if p.grad is not None}
    assert not any(name.startswith(("layers.0", "layers.1")) for name in graded)
    assert {name for name, _ in pair.live.named_parameters() if name.startswith(("residual.", "layers.2"))} <= graded


def test_a_buffer_that_is_written_with_gradients_off() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Frozen(counted=True).eval()

    pair = Pair(make, FORM, (live_toys.inputs(),))
    for _ in range(2):
        pair.assert_same(live_toys.inputs(), gradients=False)
    assert_close([pair.live.mean], [pair.static.mean])  # type: ignore[list-item]


def lora(model: nn.Module) -> Any:
    """LoRA with a start that changes the output."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["a", "b"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def test_lora_before_attach() -> None:
    pair = Pair(lambda: lora(live_toys.model()), FORM, (live_toys.inputs(),))
    pair.assert_same(live_toys.inputs())


def test_lora_after_attach() -> None:
    x = live_toys.inputs()
    live = live_toys.model()
    resfx.attach(live, FORM, (x,), backend="eager")
    perturb(live)
    plain_lora = lora(live_toys.model())(x)
    before = live(x)
    wrapped = lora(live)
    assert worst([wrapped(x)], [before]) > 1e-3
    assert worst([wrapped(x)], [plain_lora]) > 1e-3
    static = resfx.rewrite(lora(live_toys.model()), FORM, (x,))
    perturb(static)
    assert_close([wrapped(x)], [static(x)])
    wrapped(x).sum().backward()
    trained = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora" in name for name in trained)
    with wrapped.disable_adapter():
        assert_close([wrapped(x)], [before])


def test_a_quantised_leaf_that_dynamo_cannot_trace_is_named() -> None:
    """torch.ao's packed weights end the graph: no plain run, but an error that names the line."""
    x = live_toys.inputs()
    live = live_toys.model()
    resfx.attach(live, FORM, (x,), backend="eager")
    quantised = torch.ao.quantization.quantize_dynamic(live, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad(), pytest.raises(resfx.LiveError, match=r"quantized/dynamic/modules/linear\.py"):
        quantised(x)


def test_scaled_loop_has_the_learning_rates_of_the_static_rewrite() -> None:
    pair = Pair(live_toys.model, resfx.ScaledLoop(learnable=True), (live_toys.inputs(),))

    def rates(model: nn.Module) -> list[tuple[str, float, int]]:
        return [(g["name"], g["lr"], len(g["params"])) for g in resfx.parameter_groups(model, lr=0.1)]

    assert rates(pair.live) == rates(pair.static)
    assert len({rate for _, rate, _ in rates(pair.live)}) == 2


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """accelerate puts autocast around forward; the loss falls, and the new parameters learn."""
    pytest.importorskip("accelerate")
    model = DECODERS["gpt2"]()
    resfx.attach(model, FORM, (), {"input_ids": tokens()}, backend="eager")
    before = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("residual.")}
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 6)]
    options: dict[str, Any] = {"max_steps": 20, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "bf16": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), **options, use_cpu=True, report_to=[], save_strategy="no", logging_steps=5, disable_tqdm=True,
        gradient_accumulation_steps=2, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < logged[0]
    after = model.state_dict()
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
