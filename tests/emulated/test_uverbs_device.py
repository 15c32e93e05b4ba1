"""Devices, ports and GIDs as libibverbs shows them; attaching and configuring the emulator."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated.conftest import CONFIG
from emulated.core import goes_quiet
from emulated.verbs import Context, refused
from pyverbs import enums as e
from pyverbs.device import get_device_list

from aiordma import emulator
from aiordma.emulator import EmulatedDevice, EmulatedPort, EmulatorConfig, EmulatorError, Gid, Limits
from aiordma.emulator._native import native


def test_every_configured_device_is_listed_and_no_other() -> None:
    assert sorted(d.name.decode() for d in get_device_list()) == sorted(d.name for d in CONFIG.devices)


@pytest.mark.parametrize("device", CONFIG.devices, ids=lambda d: d.name)
def test_a_device_reports_what_was_configured(device: EmulatedDevice) -> None:
    with Context(name=device.name) as context:
        attr = context.query_device()
        assert int.from_bytes(attr.node_guid.to_bytes(8, "little"), "big") == device.guid
        assert attr.phys_port_cnt == len(device.ports)
        for name in ("max_qp", "max_cq", "max_cqe", "max_mr", "max_pd", "max_srq", "max_qp_wr", "max_sge"):
            wanted = getattr(device.limits, name)
            if wanted is not None:
                assert getattr(attr, name) == wanted


def test_limits_left_out_are_those_of_the_hardware() -> None:
    with Context(name="mlx5_0") as context:
        attr = context.query_device()
        assert attr.max_qp_wr == 32768
        assert attr.max_sge == 30
        assert attr.atomic_caps == e.IBV_ATOMIC_HCA
        assert (attr.vendor_id, attr.vendor_part_id) == (0x2C9, 0x101D)


def test_ports_have_their_state_and_mtu() -> None:
    with Context(name="mlx5_small") as context:
        first, second = context.query_port(1), context.query_port(2)
        assert (first.state, first.active_mtu, first.max_mtu) == (
            e.IBV_PORT_ACTIVE,
            e.IBV_MTU_1024,
            e.IBV_MTU_4096,
        )
        assert second.state == e.IBV_PORT_DOWN
        assert first.link_layer == e.IBV_LINK_LAYER_ETHERNET
        assert (first.gid_tbl_len, first.pkey_tbl_len) == (16, 1)


@pytest.mark.parametrize("port", [0, 3, 255])
def test_a_port_that_is_not_there_is_refused(port: int) -> None:
    with Context(name="mlx5_small") as context, refused(errno.EINVAL):
        context.query_port(port)


def test_gids_are_unique_to_each_port_and_come_in_both_roce_versions() -> None:
    seen: dict[str, str] = {}
    for device in CONFIG.devices:
        with Context(name=device.name) as context:
            entries = context.query_gid_table(64)
            assert len(entries) == 4 * len(device.ports)
            for entry in entries:
                where = f"{device.name}/{entry.port_num}"
                assert seen.setdefault(entry.gid_str(), where) == where
            types = [entry.gid_type for entry in entries if entry.port_num == 1]
            assert types == [e.IBV_GID_TYPE_ROCE_V1, e.IBV_GID_TYPE_ROCE_V2] * 2


def test_a_gid_table_that_does_not_fit_is_refused() -> None:
    with Context(name="mlx5_0") as context, refused(-errno.EINVAL):
        context.query_gid_table(3)


def test_an_empty_gid_entry_has_no_data_and_one_beyond_the_table_is_invalid() -> None:
    with Context(name="mlx5_0") as context:
        assert context.query_gid_ex(1, 3).gid_str().endswith("c000:0201")
        with refused(errno.ENODATA):
            context.query_gid_ex(1, 4)
        with refused(errno.EINVAL):
            context.query_gid_ex(1, 16)


def test_the_default_partition_is_the_only_one() -> None:
    with Context(name="mlx5_0") as context:
        assert context.query_pkey(1, 0) == 0xFFFF
        with pytest.raises(Exception, match="pkey"):
            context.query_pkey(1, 1)


def test_contexts_are_independent(leak_check: None) -> None:
    before = native().open_contexts()
    contexts = [Context(name=n) for n in ("mlx5_0", "mlx5_0", "mlx5_1")]
    assert native().open_contexts() == before + 3
    for context in contexts:
        context.close()
    assert native().open_contexts() == before


# ------------------------------------------------------------------ attaching


def test_attaching_again_with_the_same_configuration_does_nothing() -> None:
    with Context(name="mlx5_0"):
        emulator.attach(CONFIG)
        emulator.attach()
    assert emulator.is_attached()
    assert emulator.current_config() == CONFIG


def test_another_configuration_is_refused_while_a_device_is_open() -> None:
    with Context(name="mlx5_0"), pytest.raises(EmulatorError, match="close every context"):
        emulator.attach(devices=5)
    assert len(get_device_list()) == len(CONFIG.devices)


def test_devices_can_be_replaced_and_taken_away_when_none_is_open(run_python) -> None:
    run_python("""
        import aiordma.emulator as emulator
        from pyverbs.device import Context, get_device_list
        names = lambda: sorted(d.name.decode() for d in get_device_list())
        emulator.attach(devices=1)
        Context(name="mlx5_0").close()
        emulator.attach(devices=["left", "right"])
        assert names() == ["left", "right"], names()
        Context(name="right").close()
        emulator.detach()
        assert names() == [] and not emulator.is_attached()
        emulator.attach(devices=3)
        assert names() == ["mlx5_0", "mlx5_1", "mlx5_2"], names()
    """)


def test_attaching_too_late_says_so_and_how_to_do_it(run_python) -> None:
    run_python("""
        import aiordma.emulator as emulator
        from pyverbs.device import get_device_list
        try:
            get_device_list()
        except Exception:
            pass
        try:
            emulator.attach()
        except emulator.EmulatorError as e:
            assert "attach() before" in str(e) and "aiordma emulate" in str(e), e
        else:
            raise SystemExit("attached to a libibverbs that looks elsewhere")
        assert not emulator.is_attached()
    """)


def test_importing_pyverbs_before_attaching_is_fine(run_python) -> None:
    run_python("""
        import pyverbs.device, pyverbs.qp
        import aiordma.emulator
        aiordma.emulator.attach()
        pyverbs.device.Context(name="mlx5_0").close()
    """)


def test_a_program_started_from_here_does_not_inherit_the_emulated_sysfs(run_python) -> None:
    done = run_python("""
        import aiordma.emulator, os, subprocess, sys
        aiordma.emulator.attach()
        subprocess.run([sys.executable, "-c", "import os; print(os.environ.get('SYSFS_PATH'))"], check=True)
    """)
    assert done.stdout.strip() == "None"


# ------------------------------------------------------------------ the private folder


def test_the_folder_goes_with_the_process_and_a_killed_one_is_cleaned_up_after(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    program = "import aiordma.emulator as m, time; m.attach(); print('up', flush=True); time.sleep({})"

    def start(seconds: float) -> "subprocess.Popen[bytes]":
        p = subprocess.Popen([sys.executable, "-c", program.format(seconds)], env=env, stdout=subprocess.PIPE)
        assert p.stdout is not None
        assert p.stdout.readline() == b"up\n"
        p.stdout.close()
        return p

    killed, living = start(60), start(60)
    assert len(list(tmp_path.iterdir())) == 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(list(tmp_path.iterdir())) == 2
    third = start(0)
    third.wait()
    left = list(tmp_path.iterdir())
    living.terminate()
    living.wait()
    assert len(left) == 1, "the killed process's folder, or the third one's, is still there"


def test_a_forked_child_leaves_the_folder_to_its_parent(run_python) -> None:
    run_python("""
        import aiordma.emulator as emulator, os, sys
        emulator.attach()
        folder = emulator.sysfs_path()
        pid = os.fork()
        if not pid:
            sys.exit(0)
        os.waitpid(pid, 0)
        assert (folder / "class/infiniband/mlx5_0").is_dir()
    """)


# ------------------------------------------------------------------ configuration


def test_configurations_compare_by_what_they_mean() -> None:
    assert EmulatorConfig.of(2) == EmulatorConfig.of(["mlx5_0", "mlx5_1"])
    assert EmulatorConfig.of(2) != EmulatorConfig.of(2, legacy_write=True)
    assert EmulatorConfig.of("one") == EmulatorConfig.of([EmulatedDevice(name="one")])


def test_a_gid_may_be_given_as_an_ipv4_address() -> None:
    assert Gid("10.0.0.1") == Gid("::ffff:10.0.0.1")
    assert Gid("10.0.0.1").sysfs == "0000:0000:0000:0000:0000:ffff:0a00:0001"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gid("not an address"),
        lambda: Gid("::1", "v3"),  # type: ignore[arg-type]
        lambda: EmulatorConfig.of(0),
        lambda: EmulatorConfig.of(17),
        lambda: EmulatorConfig.of([EmulatedDevice(name="x", ports=())]),
    ],
)
def test_impossible_configurations_are_refused_early(make) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no device"),
        ("nonsense 1", 'line 1: "nonsense" is no directive'),
        ("# comment\n\nspin_us x", 'line 3: "x" is not a number'),
        ("spin_us -1", "is not a number"),
        ("legacy_write 2", "2 is more than 1"),
        ("spin_us", "takes 1 words, not 0"),
        ("limit max_qp 1", 'comes before any "device"'),
        ("device a", "takes 2 words, not 1"),
        ("device a/b 0000000000000001", "letters, digits"),
        ("device a 1", "is not a GUID"),
        ("device a 000000000000000g", "is not a GUID"),
        ("device a 0000000000000001\ndevice a 0000000000000002", "line 2: there is a device a already"),
        ("device a 0000000000000001\ndevice b 0000000000000001", "b and a have the same GUID"),
        ("device a 0000000000000001\nlimit max_cake 1", 'line 2: there is no limit "max_cake"'),
        ("device a 0000000000000001\nlimit max_qp_wr 99999", "99999 is more than 32768"),
        ("device a 0000000000000001\nport 2 state down", "numbered from 1, in order"),
        ("device a 0000000000000001\nport 3", "3 is more than 2"),
        ("device a 0000000000000001\nport 1 state", "pairs of words"),
        ("device a 0000000000000001\nport 1 state up", '"up" is unknown here'),
        ("device a 0000000000000001\nport 1 colour red", 'a port has no "colour"'),
        ("device a 0000000000000001\nport 1 mtu 4096 max_mtu 1024", "mtu is more than max_mtu"),
        ("device a 0000000000000001\ngid 1 0 1.2.3.4 v2 lo", "is not an IPv6 address"),
        ("device a 0000000000000001\ngid 1 0 ::1 v3 lo", '"v3" is unknown here'),
        ("device a 0000000000000001\ngid 1 99 ::1 v2 lo", "99 is more than 31"),
        ("device a 0000000000000001\ngid 1 20 ::1 v2 lo", "beyond a table of 16"),
        ("device a 0000000000000001\ngid 1 0 ::1 v2 lo\ngid 1 0 ::2 v2 lo", "is there already"),
        ("device a 0000000000000001\nport 1 gids 0\ngid 1 0 ::1 v2 lo", "beyond a table of 0"),
        ("device a 0000000000000001\ngid 1 0 ::1 v2 a-name-that-is-too-long", "too long"),
        ("device a 0000000000000001 " + "x " * 30, "too many words"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        native().configure(text)
    assert message in str(caught.value)
    assert len(get_device_list()) == len(CONFIG.devices), "the old configuration is gone"


def test_limits_and_the_library_know_the_same_names() -> None:
    everything = Limits(**dict.fromkeys(Limits.__dataclass_fields__, 1))
    text = EmulatorConfig(devices=(EmulatedDevice(name="x", limits=everything, ports=(EmulatedPort(),)),)).text()
    native().configure(text)
    native().configure(CONFIG.text())


def test_the_device_thread_ends_with_the_last_context(run_python) -> None:
    run_python("""
        import aiordma.emulator, os, time
        from pyverbs.device import Context
        aiordma.emulator.attach()
        threads = lambda: len(os.listdir("/proc/self/task"))
        before = threads()
        first, second = Context(name="mlx5_0"), Context(name="mlx5_0")
        assert threads() == before + 1
        first.close()
        assert threads() == before + 1
        second.close()
        # pthread_join(3) returns a little before the kernel has let go of the thread.
        deadline = time.monotonic() + 30
        while threads() != before:
            assert time.monotonic() < deadline
    """)


def test_an_idle_device_costs_next_to_no_cpu() -> None:
    with Context(name="mlx5_0"):
        assert goes_quiet(os.getpid(), time.process_time, 0.3, 1 / 3)
