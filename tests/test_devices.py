"""Device probes on made-up trees of real files, and on whatever this machine has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from notebook_cluster.agent.devices import CpuProbe, CudaProbe, Devices, MpsProbe, RocmProbe
from notebook_cluster.agent.machine import KernelSampler, OwnAddresses, host_addresses, machine_id
from notebook_cluster.agent.resources import DeviceLeases
from notebook_cluster.protocol.peer import Device, DeviceSample

GIB = 1024**3


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_card(drm: Path, number: int, *, vendor: str = "0x1002", total: int = 16 * GIB) -> None:
    device = drm / f"card{number}" / "device"
    write(device / "vendor", vendor)
    write(device / "mem_info_vram_total", str(total))
    write(device / "mem_info_vram_used", str(3 * GIB))
    write(device / "gpu_busy_percent", "42")
    write(device / "product_name", "Radeon RX 7800 XT")
    write(device / "hwmon" / "hwmon3" / "temp1_input", "61000")


@pytest.fixture
def rocm(tmp_path: Path) -> RocmProbe:
    """Two AMD cards and one of another maker; ``card1-DP-1`` is a connector, as sysfs has them."""
    make_card(tmp_path / "drm", 1)
    make_card(tmp_path / "drm", 10)
    make_card(tmp_path / "drm", 2, vendor="0x10de")
    (tmp_path / "drm" / "card1-DP-1").mkdir()
    (tmp_path / "kfd").touch()
    return RocmProbe(tmp_path / "drm", tmp_path / "kfd")


def test_rocm_cards_are_read_from_sysfs_in_the_order_of_their_numbers(rocm: RocmProbe) -> None:
    assert rocm.probe() == [
        Device(id=f"rocm:{index}", kind="rocm", name="Radeon RX 7800 XT", memory_bytes=16 * GIB) for index in (0, 1)
    ]
    assert rocm.sample()[0] == DeviceSample(
        id="rocm:0", memory_used=3 * GIB, memory_total=16 * GIB, load=0.42, temperature=61.0
    )
    assert rocm.environment("rocm:1")["HIP_VISIBLE_DEVICES"] == "1"


def test_rocm_card_that_tells_little_is_listed_without_the_rest(tmp_path: Path) -> None:
    device = tmp_path / "card0" / "device"
    write(device / "vendor", "0x1002")
    write(device / "mem_info_vram_total", str(GIB))
    probe = RocmProbe(tmp_path, tmp_path)
    assert probe.probe()[0].name == "AMD GPU"
    assert probe.sample() == [DeviceSample(id="rocm:0", memory_used=0, memory_total=GIB)]


def test_rocm_needs_its_driver(rocm: RocmProbe, tmp_path: Path) -> None:
    assert RocmProbe(tmp_path / "drm", tmp_path / "missing").probe() == []
    assert RocmProbe(tmp_path / "missing", tmp_path / "kfd").probe() == []


class NvmlError(Exception):
    pass


def nvml(*, mig: bool = False) -> Any:
    """What NVML's Python module answers on a machine with two GPUs, the second silent about its load."""

    def load(handle: str) -> Any:
        if handle == "b":
            raise NvmlError
        return SimpleNamespace(gpu=25)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: "ab"[index],
        nvmlDeviceGetMigMode=lambda handle: (int(mig and handle == "a"), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 2,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda handle, number: f"{handle}{number}",
        nvmlDeviceGetUUID=lambda handle: f"{'MIG' if len(handle) > 1 else 'GPU'}-{handle}",
        nvmlDeviceGetName=lambda handle: f"NVIDIA {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 * GIB, used=GIB),
        nvmlDeviceGetUtilizationRates=load,
        nvmlDeviceGetTemperature=lambda handle, kind: 55,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=GIB)],
    )


def test_cuda_devices_come_from_nvml_and_are_shown_to_kernels_by_uuid() -> None:
    probe = CudaProbe(nvml(), visible="0,1")
    assert [device.id for device in probe.probe()] == ["cuda:0", "cuda:1"]
    assert probe.environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    assert [sample.load for sample in probe.sample()] == [0.25, None]
    assert probe.process_memory() == {7: 2 * GIB}


@pytest.mark.parametrize(("visible", "ids"), [("1", ["cuda:1"]), ("GPU-a", ["cuda:0"]), ("", []), ("-1", [])])
def test_cuda_lists_only_what_a_scheduler_gave_this_process(visible: str, ids: list[str]) -> None:
    assert [device.id for device in CudaProbe(nvml(), visible=visible).probe()] == ids


def test_gpu_in_mig_mode_is_listed_as_its_instances() -> None:
    probe = CudaProbe(nvml(mig=True), visible="0,1,2")
    assert [device.name for device in probe.probe()] == ["NVIDIA a0", "NVIDIA a1", "NVIDIA b"]
    assert probe.environment("cuda:0") == {"CUDA_VISIBLE_DEVICES": "MIG-a0"}


def test_machine_without_nvidia_driver_has_no_cuda_devices() -> None:
    def no_library() -> None:
        raise NvmlError("library not found")

    broken = nvml()
    broken.nvmlInit = no_library
    assert CudaProbe(broken).probe() == []


def test_mps_is_found_on_apple_silicon_only() -> None:
    answers = {"hw.memsize": str(16 * GIB), "machdep.cpu.brand_string": "Apple M2"}
    found = MpsProbe("darwin", "arm64", answers.__getitem__).probe()
    assert found == [Device(id="mps", kind="mps", name="Apple M2", memory_bytes=16 * GIB, unified=True)]
    assert MpsProbe("linux", "aarch64", answers.__getitem__).probe() == []
    assert MpsProbe("darwin", "x86_64", answers.__getitem__).sample() == []


def test_cpu_is_always_there_with_its_name_and_ram(tmp_path: Path) -> None:
    write(tmp_path / "cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 3GHz")
    device = CpuProbe(tmp_path / "cpuinfo").probe()[0]
    assert (device.id, device.name) == ("cpu", "Some CPU @ 3GHz")
    assert device.memory_bytes == psutil.virtual_memory().total
    sample = CpuProbe().sample()[0]
    assert 0 < sample.memory_used <= sample.memory_total


def test_kernel_sees_its_own_accelerator_and_no_other(rocm: RocmProbe) -> None:
    devices = Devices([CudaProbe(nvml(), visible="0,1"), rocm, CpuProbe()])
    devices.probe()
    assert devices.environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-b", "HIP_VISIBLE_DEVICES": ""}
    assert devices.environment("cpu") == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert devices.accelerators()[0].kind == "cuda"
    assert {sample.id for sample in devices.sample()} == {"cuda:0", "cuda:1", "rocm:0", "rocm:1", "cpu"}
    assert devices.summary() == "NVIDIA a, NVIDIA b, 2 x Radeon RX 7800 XT"


def test_probing_this_machine_finds_its_processor_and_no_error() -> None:
    devices = Devices()
    assert devices.probe()[-1].id == "cpu"
    assert len(devices.sample()) == len(devices.found)


def test_lease_keeps_other_agents_out_until_it_is_given_back(tmp_path: Path) -> None:
    first, second = DeviceLeases(tmp_path / "leases", "m"), DeviceLeases(tmp_path / "leases", "m")
    assert first.take("cuda:0", "digits") is None
    assert second.take("cuda:0", "text") == "digits"
    assert first.take("cuda:0", "text") == "digits"
    assert second.take("cuda:1", "text") is None
    assert second.holders(["cuda:0", "cuda:1", "cuda:2"]) == {"cuda:0": "digits", "cuda:1": "text"}
    first.give_back("cuda:0")
    assert second.holders(["cuda:0"]) == {}
    assert second.take("cuda:0", "text") is None
    second.close()
    assert first.holders(["cuda:0", "cuda:1"]) == {}


def test_leases_of_machines_that_share_a_home_folder_do_not_meet(tmp_path: Path) -> None:
    assert DeviceLeases(tmp_path, "one").take("cuda:0", "digits") is None
    assert DeviceLeases(tmp_path, "two").take("cuda:0", "text") is None


def test_peak_memory_is_the_systems_own_where_it_keeps_one(tmp_path: Path) -> None:
    process = psutil.Process()
    write(tmp_path / str(process.pid) / "status", f"Name:\tpython\nVmHWM:\t{64 * 1024 * 1024} kB")
    sampler = KernelSampler(process.pid, proc=tmp_path)
    sample = sampler.sample("desk", {process.pid: 5})
    assert sample is not None
    assert (sample.rss_peak, sample.device_memory) == (64 * GIB, 5)
    assert sample.rss < sample.rss_peak


def test_process_that_is_gone_has_no_sample() -> None:
    assert KernelSampler(2**22 + 1).sample("desk", {}) is None


def test_machine_id_is_stable_and_differs_between_network_namespaces(tmp_path: Path) -> None:
    assert machine_id() == machine_id()
    write(tmp_path / "boot", "b")
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(f"net:[{name}]")
    ids = {machine_id(tmp_path / "boot", tmp_path / name) for name in ("one", "two")}
    assert len(ids) == 2


def test_a_machine_on_no_network_keeps_saying_where_it_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["10.0.0.5", "127.0.0.1"]
    monkeypatch.setattr("notebook_cluster.agent.machine.host_addresses", lambda: here)
    addresses = OwnAddresses()
    assert addresses.read() == here
    here = ["127.0.0.1"]
    assert addresses.read() == ["10.0.0.5", "127.0.0.1"]
    here = ["10.0.7.7", "127.0.0.1"]
    assert addresses.read() == here


def test_loopback_is_the_last_address() -> None:
    addresses = host_addresses()
    assert addresses[-1] == "127.0.0.1"
    assert len(set(addresses)) == len(addresses)
