"""The real nvidia-ml-py against a fake libnvidia-ml.so.1, built here and loaded in a subprocess."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stratoscope.instrumentation import semconv as sc

pytest.importorskip("pynvml")
TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "nvml"
SOURCE = TESTS / "fakes" / "nvml" / "fake_nvml.c"
GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIG = "MIG-00000000-0000-0000-0000-000000000000"

PRELUDE = """
import json, logging, os, pathlib, sys, time
from stratoscope.instrumentation.gpu import nvml
from stratoscope.instrumentation.gpu.nvml import NvmlSampler
log = []
class Handler(logging.Handler):
    def emit(self, record): log.append((record.levelname, record.getMessage()))
logging.getLogger("vllm.stratoscope").addHandler(Handler())
logging.getLogger("vllm.stratoscope").setLevel(logging.DEBUG)
script = pathlib.Path(os.environ["FAKE_NVML_FILE"])
def change(**values):
    text = script.read_text()
    for key, value in values.items():
        text += f"{key.replace('__', '.')} = {value}\\n"
    part = script.with_suffix(".new"); part.write_text(text); part.replace(script)
def take(sampler):
    return [[s.name, s.unit, s.kind, s.value, dict(s.attributes), s.time_ns] for s in sampler.drain()]
def once(sampler):
    sampler.sample_once(); return take(sampler)
def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, log
        time.sleep(0.01)
"""


def build(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    library = folder / "libnvidia-ml.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
    ]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("old_driver"), "-DOLD_DRIVER")


@pytest.fixture
def run(tmp_path, driver):
    """Runs a script that ends by printing JSON; ``extra`` lines override those of the data file."""

    def run(script, data="h200_load.txt", extra="", library=driver, **environ):
        text = ((DATA / data).read_text() if data else "") + extra
        (tmp_path / "nvml.txt").write_text(text)
        kept = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environ = {
            **kept,
            "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML_FILE": str(tmp_path / "nvml.txt"),
            "FAKE_NVML_CALLS": str(tmp_path / "calls.txt"),
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + script],
            check=False,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def values(samples, name, **attributes):
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    return [s[3] for s in samples if s[0] == name and wanted.items() <= s[4].items()]


def one(samples, name, **attributes):
    (value,) = values(samples, name, **attributes)
    return value


ONCE = "s = NvmlSampler(); assert s.open(); out = once(s); s.close(); print(json.dumps(out))"


def test_the_values_of_a_loaded_h200(run):
    samples = run(ONCE)
    assert one(samples, sc.M_GPU_UTILIZATION) == 1.0
    assert one(samples, sc.M_GPU_MEMORY_BUSY) == pytest.approx(0.07)
    assert one(samples, sc.M_GPU_MEMORY_USAGE) == 33_934_016_512
    assert one(samples, sc.M_GPU_MEMORY_LIMIT) == 150_754_820_096
    assert one(samples, sc.M_POWER) == pytest.approx(626.26)  # instant, not the average of 627.4
    assert one(samples, sc.M_GPU_POWER_LIMIT) == 700
    assert one(samples, sc.M_TEMPERATURE, hw__sensor_location="gpu") == 52
    assert one(samples, sc.M_TEMPERATURE, hw__sensor_location="memory") == 40
    assert one(samples, sc.M_GPU_CLOCK, stratoscope__gpu__clock="sm") == 1_980_000_000
    assert one(samples, sc.M_GPU_CLOCK_LIMIT, stratoscope__gpu__clock="memory") == 3_201_000_000
    assert one(samples, sc.M_GPU_PCIE_GENERATION) == 5
    assert one(samples, sc.M_GPU_PCIE_WIDTH) == 16
    assert one(samples, sc.M_GPU_PROCESSES) == 3
    assert one(samples, sc.M_GPU_PROCESS_MEMORY, process__pid=10309) == 28234 << 20
    assert one(samples, sc.M_ERRORS, error__type="ecc_uncorrected") == 0
    assert {s[4][sc.HW_ID] for s in samples} == {GPU}
    assert values(samples, sc.M_STATUS, hw__state="ok", hw__model="NVIDIA H200", hw__name="gpu0") == [1]
    assert values(samples, sc.M_STATUS, hw__state="failed", hw__vendor="NVIDIA") == [0]


def test_every_series_appears_once_in_a_sample_and_units_agree(run):
    samples = run(ONCE)
    series = [(s[0], json.dumps(s[4], sort_keys=True)) for s in samples]
    assert len(series) == len(set(series))
    for name in {s[0] for s in samples}:
        assert len({(s[1], s[2]) for s in samples if s[0] == name}) == 1


def test_counters_count_from_the_first_reading_and_survive_a_restart(run):
    samples = run(
        "s = NvmlSampler(); s.open(); a = once(s)\n"
        "change(gpu0__field__83=7000500000, gpu0__field__138__all=1500, gpu0__field__74=2000000000)\n"
        "b = once(s)\n"
        "change(gpu0__field__83=250000)\n"  # fell: the driver counts anew
        "print(json.dumps([a, b, once(s)]))"
    )
    energy = [one(part, sc.M_ENERGY) for part in samples]
    assert energy == pytest.approx([0, 500, 750])
    link = {"stratoscope__gpu__link": "nvlink", "network__io__direction": "transmit"}
    assert [values(part, sc.M_GPU_IO, **link) for part in samples] == [
        [0],
        [500 * 1024],
        [],
    ]
    throttled = [values(part, sc.M_GPU_THROTTLE_TIME, stratoscope__gpu__reason="power") for part in samples]
    assert throttled == [[0], [pytest.approx(2)], []]


def test_what_does_not_change_is_given_again_only_with_the_slow_group(run):
    parts = run(
        "s = NvmlSampler(); s.open(); parts = [once(s), once(s)]\n"
        "change(gpu0__temperature_c=53, gpu0__clocks_event_reasons=4); parts.append(once(s))\n"
        "change(gpu0__clocks_event_reasons=0); parts.append(once(s))\n"
        "s._slow_due_s = 0.0; parts.append(once(s)); print(json.dumps(parts))"
    )
    assert parts[1] == []
    assert [(s[0], s[3]) for s in parts[2]] == [
        (sc.M_TEMPERATURE, 53),
        (sc.M_GPU_CLOCKS_EVENT, 1),
    ]
    assert [(s[0], s[3]) for s in parts[3]] == [(sc.M_GPU_CLOCKS_EVENT, 0)]
    assert len(parts[4]) == len(parts[0])


def test_reasons_are_split_by_name(run):
    samples = run(ONCE, extra="gpu0.clocks_event_reasons = 132\n")  # 0x80 + 0x04
    active = [s[4][sc.GPU_REASON] for s in samples if s[0] == sc.M_GPU_CLOCKS_EVENT and s[3] == 1]
    assert sorted(active) == ["hw_power_brake_slowdown", "sw_power_cap"]
    assert len(values(samples, sc.M_GPU_CLOCKS_EVENT)) == 9


def test_what_a_gpu_lacks_is_asked_for_once(run, tmp_path):
    samples = run(
        "s = NvmlSampler(); s.open(); once(s); s._slow_due_s = 0.0; out = once(s); print(json.dumps(out))",
        data="l40s_load.txt",
        extra="gpu0.utilization_gpu = !3\n",
    )
    assert one(samples, sc.M_POWER) == pytest.approx(112.38)
    assert values(samples, sc.M_TEMPERATURE, hw__sensor_location="memory") == []
    assert values(samples, sc.M_GPU_IO) == values(samples, sc.M_ENERGY) == []
    assert values(samples, sc.M_GPU_UTILIZATION) == values(samples, sc.M_GPU_MEMORY_BUSY) == []
    calls = (tmp_path / "calls.txt").read_text().split()
    assert calls.count("field.82") == calls.count("field.138.all") == calls.count("utilization_gpu") == 1
    assert calls.count("clock_sm_mhz") == calls.count("ecc_corrected") == 2


def test_power_falls_back_to_the_average_where_there_is_no_instant_reading(run):
    script = "s = NvmlSampler(); s.open(); once(s); print(json.dumps(once(s)))"
    samples = run(script, extra="gpu0.field.186 = !3\n")
    assert one(samples, sc.M_POWER) == pytest.approx(627.4)


def test_a_driver_without_the_newer_functions(run, old_driver):
    script = "s = NvmlSampler(); s.open(); once(s); print(json.dumps(once(s)))"
    samples = run(script, library=old_driver, extra="gpu0.clocks_event_reasons = 4\n")
    assert one(samples, sc.M_GPU_CLOCKS_EVENT, stratoscope__gpu__reason="sw_power_cap") == 1
    assert one(samples, sc.M_GPU_MEMORY_USAGE) == 33_934_016_512 + 643_825_664  # version 1 counts reserved


def test_a_byte_counter_of_32_bits_is_not_trusted(run):
    samples = run(ONCE, extra="gpu0.field.197 = u32:4217000\n")
    assert (
        values(
            samples,
            sc.M_GPU_IO,
            stratoscope__gpu__link="pcie",
            network__io__direction="transmit",
        )
        == []
    )
    assert values(
        samples,
        sc.M_GPU_IO,
        stratoscope__gpu__link="pcie",
        network__io__direction="receive",
    ) == [0]


def test_an_error_that_may_pass_is_tried_again_but_not_for_ever(run, tmp_path):
    samples = run(
        "s = NvmlSampler(); s.open()\n"
        "change(gpu0__temperature_c='!999', gpu0__clock_sm_mhz='!999'); once(s); once(s)\n"
        "change(gpu0__temperature_c=53); out = once(s)\n"
        "for _ in range(5): once(s)\n"
        "print(json.dumps(out))"
    )
    assert one(samples, sc.M_TEMPERATURE, hw__sensor_location="gpu") == 53
    assert (tmp_path / "calls.txt").read_text().split().count("clock_sm_mhz") == 5


TWO = "devices = 2\ngpu1.uuid = GPU-11111111-0000-0000-0000-000000000000\ngpu1.temperature_c = 60\n"


@pytest.mark.parametrize("error", ["!15", "!16"])
@pytest.mark.parametrize("key", ["gpu0.clock_sm_mhz", "gpu0.field.83"])
def test_a_lost_gpu_is_reported_once_and_the_other_goes_on(run, error, key):
    out = run(
        "s = NvmlSampler(); s.open(); a = once(s)\n"
        f"change(**{{{key!r}: {error!r}}})\n"
        "b = once(s); s._slow_due_s = 0.0; c = once(s); print(json.dumps({'parts': [a, b, c], 'log': log}))",
        extra=TWO,
    )
    assert {s[4][sc.HW_ID] for s in out["parts"][1] if s[0] == sc.M_STATUS} == {GPU}
    assert values(out["parts"][1], sc.M_STATUS, hw__state="failed") == [1]
    assert values(out["parts"][1], sc.M_STATUS, hw__state="ok") == [0]
    assert {s[4][sc.HW_ID][:5] for s in out["parts"][2]} == {"GPU-1"}
    assert [level for level, text in out["log"] if GPU in text] == ["WARNING"]


def test_the_thread_ends_when_its_last_gpu_is_lost(run):
    out = run(
        "s = NvmlSampler(hz=10); s.start(); wait_for(lambda: len(s._samples))\n"
        "change(gpu0__clock_sm_mhz='!15'); wait_for(lambda: not s.running)\n"
        "print(json.dumps(take(s)))"
    )
    assert values(out, sc.M_STATUS, hw__state="failed") == [0, 1]


def test_a_driver_that_goes_and_comes_back(run):
    out = run(
        "nvml._REOPEN_S = 0.02\n"
        "s = NvmlSampler(hz=10); s.start(); wait_for(lambda: len(s._samples))\n"
        "change(all='!9'); wait_for(lambda: log); take(s)\n"
        "change(gpu0__field__83=7000900000, all='0'); wait_for(lambda: len(s._samples)); out = take(s)\n"
        "s.stop(30); print(json.dumps({'out': out, 'log': log, 'running': s.running}))"
    )
    assert values(out["out"], sc.M_ENERGY)[0] == pytest.approx(900)
    assert [level for level, _ in out["log"]] == ["WARNING"]
    assert out["running"] is False


def test_without_a_driver_it_says_so_once_at_debug_level_and_stays_off(run, tmp_path):
    script = (
        "s = NvmlSampler(hz=10); s.start(); wait_for(lambda: not s.running); s.stop()\n"
        "print(json.dumps([take(s), log]))"
    )
    for environ in ({"LD_LIBRARY_PATH": ""}, {}):
        samples, log = run(script, extra="all = !9\n", **environ)
        assert samples == []
        assert [level for level, _ in log] == ["DEBUG"]


def test_a_slow_driver_is_asked_less_often_and_stop_does_not_wait_for_it(run):
    slowed, base = run(
        "s = NvmlSampler(hz=10); change(delay_us=20000); s.start()\n"
        "wait_for(lambda: s.interval_s > s.period_s); s.stop(0.0)\n"
        "print(json.dumps([s.interval_s, s.period_s]))"
    )
    # At least seven calls of 20 ms each, at most a twentieth of the time.
    assert slowed >= 20 * 7 * 0.02 and base == pytest.approx(0.1)


def test_samples_that_nobody_drains_make_way(run):
    waiting, dropped, total = run(
        "s = NvmlSampler(max_samples=10); s.open(); s.sample_once(); n = s.dropped + len(s._samples)\n"
        "print(json.dumps([len(s.drain()), s.dropped, n]))"
    )
    assert waiting == 10 and dropped == total - 10 > 0


@pytest.mark.parametrize("hz, environ", [(0, None), (1, {"CUDA_VISIBLE_DEVICES": ""})])
def test_off_means_no_thread(hz, environ):
    from stratoscope.instrumentation.gpu.nvml import NvmlSampler

    sampler = NvmlSampler(hz=hz, environ=environ or {})
    sampler.start()
    sampler.stop()
    assert sampler.running is False and sampler.drain() == []


@pytest.mark.parametrize(
    "wanted, found",
    [
        (None, ["GPU-0", "GPU-1"]),
        ("0,1", ["GPU-0", "GPU-1"]),
        ("1", ["GPU-1"]),
        ("1,0,1", ["GPU-1", "GPU-0"]),
        ("1,7,0", ["GPU-1"]),  # CUDA, too, stops at the first that names nothing
        ("0,-1,1", ["GPU-0"]),
        ("GPU-11111111-0000-0000-0000-000000000000", ["GPU-1"]),
        ("GPU-1111", ["GPU-1"]),
        ("GPU-", []),  # an ambiguous beginning
        ("11111111-0000-0000-0000-000000000000", ["GPU-1"]),  # as torch writes it
        ("MIG-nowhere", []),
        ("NoDevFiles", []),
    ],
)
def test_which_devices(run, wanted, found):
    environ = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    script = "s = NvmlSampler(); s.open(); print(json.dumps([d.uuid for d in s._devices]))"
    assert [uuid[:5] for uuid in run(script, extra=TWO, **environ)] == found


def test_a_mig_device_has_its_memory_and_its_gpu_has_the_rest(run):
    samples = run(ONCE, data="h200_mig_load.txt", CUDA_VISIBLE_DEVICES=MIG)
    mine = [s for s in samples if s[4][sc.HW_ID] == MIG]
    assert {s[0] for s in mine} == {
        sc.M_STATUS,
        sc.M_GPU_MEMORY_USAGE,
        sc.M_GPU_MEMORY_LIMIT,
        sc.M_GPU_PROCESSES,
        sc.M_GPU_PROCESS_MEMORY,
    }
    assert one(mine, sc.M_GPU_MEMORY_USAGE) == 16925 << 20
    assert {s[4][sc.HW_PARENT] for s in mine} == {GPU}
    gpu = [s for s in samples if s[4][sc.HW_ID] == GPU]
    assert one(gpu, sc.M_POWER) == pytest.approx(292.14)
    assert values(gpu, sc.M_GPU_UTILIZATION) == []  # a GPU split by MIG does not report it
    assert len(mine) + len(gpu) == len(samples)  # the other MIG device is somebody else's
