"""The model of the benchmarks whose steps sleep, as the beginning of a cell: it stands for any model of its size."""

MODEL = """
import json, time
import torch
torch.set_num_threads(1)
sizes = [len(part) for part in torch.arange({parameters}).tensor_split(min(8, {parameters}))]
noise = [1e-4 * torch.randn(size, generator=torch.Generator().manual_seed(rank)) for size in sizes]

def make_model():
    generator = torch.Generator().manual_seed(7)
    return torch.nn.ParameterList([0.02 * torch.randn(size, generator=generator) for size in sizes])

def change(model, number):
    "What step `number` changes: one part of the parameters."
    with torch.no_grad():
        part = number % len(noise)
        model[part].add_(noise[part])

def sleep_until(moment):
    time.sleep(max(0.0, moment - time.perf_counter()))
"""
"""To be formatted with ``parameters``, their number."""
