"""LoRA: only the adapter travels, all nodes have the same one, PEFT loads it; DataParallel is as one process."""

import json
from collections.abc import Iterator

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import mend, run, shared_cluster, text_of
from tests.practice.recipes import RECIPES, recipe

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

NODES = ("local", "local-2", "local-3")
LIBRARIES = """
import copy, hashlib, json, torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
torch.set_num_threads(1)
"""
BASE = """
def base_model():
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
def with_adapter(base, seed=1):
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
def tokens(step, of=None):
    generator = torch.Generator().manual_seed(100 * step + (rank if of is None else of))
    return torch.randint(64, (4, 16), generator=generator)
def loss_of(model, x):
    return model(input_ids=x, labels=x).loss
def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
def a_hash(tensors):
    return hashlib.sha256(b"".join(tensors[name].cpu().numpy().tobytes() for name in sorted(tensors))).hexdigest()
def train(model, sync, steps, parameters=None):
    parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    rounds = []
    for step in range(steps):
        loss = loss_of(model, tokens(step))
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        rounds.append(sync.step(loss, samples=4))
    sync.finish()
    return [one for one in rounds if one is not None]
"""
A, B = 2 * 4 * 32, 2 * 4 * 96
"""Elements of the factors: two layers, rank 4, c_attn from 32 to 96."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        run(cluster, LIBRARIES + BASE)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


def facts(said: dict[str, str]) -> dict[str, dict[str, object]]:
    return {name: json.loads(text[text.index("FACTS") + 5 :].splitlines()[0]) for name, text in said.items()}


def test_a_round_carries_the_adapter_alone(cluster: Cluster) -> None:
    cell = """
model = with_adapter(base_model(), seed=rank)  # A is that of rank 0
before = a_hash({name: p for name, p in model.named_parameters() if not p.requires_grad})
sync = nc.DiLoCo(model, every=2, fresh=True)
rounds = train(model, sync, 4)
frozen = a_hash({name: p for name, p in model.named_parameters() if not p.requires_grad})
print("FACTS", json.dumps({"bytes": [one.bytes_sent for one in rounds], "parameters": sync.memory.parameters,
    "adapter": a_hash(trained(model)), "same": frozen == before, "all": sum(p.numel() for p in model.parameters())}))
"""
    found = facts(run(cluster, cell))
    assert len({one["adapter"] for one in found.values()}) == 1
    for one in found.values():
        assert (one["parameters"], one["same"]) == (A + B, True)
        assert one["all"] > 20 * (A + B)  # type: ignore[operator]
    # each sends its contribution to the owner of the one slice, who sends the mean to the others
    sent = [sum(one["bytes"][round] for one in found.values()) for round in range(2)]  # type: ignore[index]
    assert sent == [4 * 4 * (A + B)] * 2


def test_freeze_a_trains_and_sends_b_alone(cluster: Cluster) -> None:
    cell = """
model = with_adapter(base_model())
everything = list(model.parameters())
loss_of(model, tokens(0)).backward()  # gradients of before are forgotten
a = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
sync = nc.DiLoCo(model, every=2, fresh=True, freeze_a=True)
rounds = train(model, sync, 4, everything)
now = {name: p.detach() for name, p in model.named_parameters() if "lora_A" in name}
mean = {name: nc.all_reduce(p.detach()) / world_size for name, p in model.named_parameters() if "lora_B" in name}
print("FACTS", json.dumps({"names": sorted(trained(model)), "parameters": sync.memory.parameters,
    "same": all(torch.equal(a[name], now[name]) for name in a), "adapter": a_hash(trained(model)),
    "bytes": sum(one.bytes_sent for one in rounds)}))
"""
    found = facts(run(cluster, cell))
    assert len({one["adapter"] for one in found.values()}) == 1
    for one in found.values():
        assert (one["parameters"], one["same"]) == (B, True)
        assert all("lora_B" in name for name in one["names"])  # type: ignore[attr-defined]
    assert sum(one["bytes"] for one in found.values()) == 2 * 4 * 4 * B  # type: ignore[misc]


def test_freeze_a_is_refused_where_a_differs_and_where_there_is_none(cluster: Cluster) -> None:
    cell = "sync = nc.DiLoCo(with_adapter(base_model(), seed=rank // 2), 1, fresh=True, freeze_a=True); sync.finish()"
    ended, outputs = cluster.run(cell)
    assert {name for name, result in ended.results.items() if result.error_name == "TrainingError"} == {"local-3"}
    assert "'transformer.h.0.attn.c_attn.lora_A.default.weight' has other values on 'local-3'" in text_of(outputs)
    ended, outputs = cluster.run("nc.SparseLoCo(base_model(), freeze_a=True)")
    assert {result.error_name for result in ended.results.values()} == {"ValueError"}
    assert "freeze_a=True: GPT2LMHeadModel has no lora_A (PEFT) and no lora_a (mlx)" in text_of(outputs)


def test_with_freeze_a_a_round_of_plain_averaging_is_the_mean_of_the_adapters(cluster: Cluster) -> None:
    """B A, the change of the weight, is linear in B; of both factors the mean differs from it."""
    cell = """
def deltas(model):
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and "default" in getattr(m, "lora_A", {})]
    return torch.cat([(m.lora_B["default"].weight @ m.lora_A["default"].weight).detach().reshape(-1) for m in layers])
off = {}
for freeze_a in (True, False):
    model = with_adapter(base_model())
    sync = nc.LocalSGD(model, every=8, fresh=True, freeze_a=freeze_a)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(8):
        loss = loss_of(model, tokens(step))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step == 7:
            own = deltas(model)
        sync.step(loss, samples=4)
    sync.finish()
    mean = sum(nc.all_gather(own)) / world_size
    off[freeze_a] = float((deltas(model) - mean).norm() / mean.norm())
print("FACTS", json.dumps({"frozen": off[True], "both": off[False]}))
"""
    for one in facts(run(cluster, cell)).values():
        assert one["frozen"] < 1e-5  # type: ignore[operator]
        assert one["both"] > 1e-2  # type: ignore[operator]


def test_the_saved_adapter_is_equal_on_all_nodes_and_peft_loads_it(cluster: Cluster) -> None:
    cell = """
import pathlib, tempfile
from safetensors.torch import load_file
def saved(model):
    folder = pathlib.Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    return folder, hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
def loads(folder, model):
    again = PeftModel.from_pretrained(base_model(), folder)
    x = tokens(99, of=0)
    model.eval(), again.eval()
    same = torch.equal(again(input_ids=x).logits, model(input_ids=x).logits)
    model.train()
    return same
model = with_adapter(base_model())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
sync = nc.DiLoCo(model, every=4, fresh=True)
for step in range(6):
    loss = loss_of(model, tokens(step))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    sync.step(loss, samples=4)
own = saved(model)[1]
with sync.global_model():
    middle, middle_hash = saved(model)
    same = loads(middle, model)
sync.finish()
last, last_hash = saved(model)
factors = load_file(last / "adapter_model.safetensors")
moved = sum(float(tensor.abs().sum()) for name, tensor in factors.items() if "lora_B" in name)
print("FACTS", json.dumps({"own": own, "middle": middle_hash, "last": last_hash, "moved": moved,
                          "same": same and loads(last, model)}))
"""
    found = facts(run(cluster, cell))
    assert len({one["own"] for one in found.values()}) == 3
    (middle,), (last,) = {one["middle"] for one in found.values()}, {one["last"] for one in found.values()}
    assert middle != last
    assert all(one["same"] and one["moved"] for one in found.values())


BRANCHES = """
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(8, 16)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(2))
    def forward(self, x, step):
        return self.branches[step % 2](torch.tanh(self.stem(x)))
def branches():
    torch.manual_seed(0)
    return Branches()
def loss_of_branches(model, step, of):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + of))
    return torch.nn.functional.mse_loss(model(x, step), x)
def lora():
    return with_adapter(base_model())
def loss_of_lora(model, step, of):
    return loss_of(model, tokens(step, of))
def counts(model, optimizer):
    return {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if p in optimizer.state}
def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters() if p.requires_grad])
"""
AGAINST_ONE = """
make, loss_in = {kind}, loss_of_{kind}
def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003, weight_decay=0.1)
model = make(); optimizer = adamw(model); start = flat(model)
sync = nc.DataParallel(model, optimizer, fresh=True, resend=None)
for step in range(50):
    loss = loss_in(model, step, rank)
    loss.backward()
    sync.step(loss, samples=4)
sync.finish()
one = make(); alone = adamw(one)
for step in range(50):
    alone.zero_grad()
    torch.stack([loss_in(one, step, node) for node in range(world_size)]).mean().backward()
    alone.step()
off = float((flat(model) - flat(one)).norm() / (flat(one) - start).norm())
print("FACTS", json.dumps({{"off": off, "steps": counts(model, optimizer), "alone": counts(one, alone)}}))
"""


@pytest.mark.parametrize("kind", ["branches", "lora"])
def test_data_parallel_adamw_is_that_of_one_process_over_fifty_steps(cluster: Cluster, kind: str) -> None:
    run(cluster, BRANCHES)
    for one in facts(run(cluster, AGAINST_ONE.format(kind=kind))).values():
        assert one["off"] <= 1e-5, one["off"]  # type: ignore[operator]
        assert one["steps"] == one["alone"]
        assert set(one["alone"].values()) == ({50} if kind == "lora" else {25, 50})  # type: ignore[attr-defined]


# ---- docs ------------------------------------------------------------------------------------------------------


def test_the_recipe_with_peft_trains_one_adapter_and_saves_it(cluster: Cluster) -> None:
    run(cluster, "if rank == 0:\n    base_model().save_pretrained('base')\nnc.barrier()")
    run(cluster, "data = torch.cat([tokens(step, of=0) for step in range(24)])")
    cell = (
        recipe("LoRA with PEFT")
        + """
nc.barrier()
again = PeftModel.from_pretrained(base_model(), "adapter")
print("FACTS", json.dumps({"adapter": a_hash(trained(model)), "round": sync.round, "saved": a_hash(
    {name: p for name, p in again.named_parameters() if "lora_" in name})}))
"""
    )
    found = facts(run(cluster, cell))
    assert len({(one["adapter"], one["saved"]) for one in found.values()}) == 1
    assert all(one["round"] and one["adapter"] == one["saved"] for one in found.values())


def test_the_recipe_in_mlx_trains_one_adapter_and_freezes_a(cluster: Cluster) -> None:
    pytest.importorskip("mlx_lm")
    make = """
import mlx.core as mx, numpy as np
from mlx.utils import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM
if rank == 0:
    sizes = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, vocab_size=64)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("base")
nc.barrier()
data = np.random.default_rng(0).integers(64, size=(72, 16))
"""
    cell = (
        make
        + recipe("LoRA in MLX")
        + """
names = [name for name, _ in tree_flatten(model.trainable_parameters())]
values = b"".join(np.array(array).tobytes() for _, array in tree_flatten(model.trainable_parameters()))
print("FACTS", json.dumps({"names": names, "hash": hashlib.sha256(values).hexdigest(), "round": sync.round}))
"""
    )
    found = facts(run(cluster, cell))
    assert len({one["hash"] for one in found.values()}) == 1
    for one in found.values():
        assert one["round"]
        assert all("lora_" in name for name in one["names"])  # type: ignore[attr-defined]
    frozen = cell.replace("nc.DiLoCo(model,", "nc.DiLoCo(model, freeze_a=True, fresh=True,")
    assert frozen != cell
    for one in facts(run(cluster, frozen)).values():
        assert one["names"]
        assert all("lora_b" in name for name in one["names"])  # type: ignore[attr-defined]


def test_the_bytes_that_the_docs_tell_are_those_of_the_models() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    text = (RECIPES.parent / "training.md").read_text()
    for config, rank, targets in (
        (GPT2Config(), 8, None),
        (GPT2Config(), 8, "all-linear"),
        (LlamaConfig(), 16, "all-linear"),
    ):
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config)
            model = get_peft_model(base, LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
        factors = [sum(p.numel() for name, p in model.named_parameters() if f"lora_{one}" in name) for one in "AB"]
        assert f"| {sum(factors):,} | {factors[1]:,} |" in text
