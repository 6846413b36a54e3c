"""A short training that measures what curves have to bear: two jobs, a second run of one, NaN and infinity, and numbers
of the global model and of no job."""

TRAIN = """%%on_all
import math, torch
torch.manual_seed(0)
LOSSES = [8.0, 7.0, math.nan, math.inf, 4.0, 3.0]
def train(name="model", fresh=False, losses=LOSSES):
    model = torch.nn.Linear(4, 4)
    sync = nc.DiLoCo(model, every=2, codec="int8", name=name, fresh=fresh)
    for loss in losses:
        if sync.step(loss=loss + 10 * rank, samples=4):
            with sync.global_model():
                nc.report(loss=100.0 - sync.round, accuracy=sync.round / 10)
    sync.finish()
train()
"""
AGAIN = "%%on_all\ntrain(fresh=True, losses=[2.0, 1.0])\ntrain('other', losses=[0.5, 0.25])\n"
POINTS = {
    ("model", 1, "local", "loss"): [8.0, 7.0, float("nan"), float("inf"), 4.0, 3.0],
    ("model", 1, "local-2", "loss"): [18.0, 17.0, float("nan"), float("inf"), 14.0, 13.0],
    ("model", 1, "", "loss"): [99.0, 98.0, 97.0],
    ("model", 1, "", "accuracy"): [0.1, 0.2, 0.3],
}
"""What :data:`TRAIN` measures."""
LATER = {
    ("model", 2, "local", "loss"): [2.0, 1.0],
    ("model", 2, "local-2", "loss"): [12.0, 11.0],
    ("model", 2, "", "loss"): [99.0],
    ("model", 2, "", "accuracy"): [0.1],
    ("other", 1, "local", "loss"): [0.5, 0.25],
    ("other", 1, "local-2", "loss"): [10.5, 10.25],
    ("other", 1, "", "loss"): [99.0],
    ("other", 1, "", "accuracy"): [0.1],
}
"""What :data:`AGAIN` measures."""


def alike(found: list[float], wanted: list[float]) -> bool:
    """Equal, where NaN is NaN."""
    return [repr(float(one)) for one in found] == [repr(float(one)) for one in wanted]
