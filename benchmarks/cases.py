"""What is measured, and who takes part. Names are keys in the results, and stay."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from devices import Bench

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"
PROGRAMS = HERE / "programs"
LOOPS = ("asyncio", "uvloop", "trio")
SPIN_US = 20  # aiordma's default
#: Where much memory is touched it matters which pages a process happened to get: so many of each contender take turns.
SEVERAL = 3
IN_TURNS = "Up to three processes of each take turns."

#: Programs in C, and the libraries that they want.
C_PROGRAMS = {
    "verbs": ("-libverbs",),
    "direct": ("-libverbs", "-lmlx5"),
    "pingpong": ("-libverbs",),
    "memcpy": ("-libverbs", "-lmlx5"),
    "strided": ("-libverbs", "-lmlx5"),
    "dc": ("-libverbs", "-lmlx5"),
}

TITLES = {
    "c_verbs": "C, ibv_post_send",
    "c_direct": "C, ibv_wr_* (mlx5dv)",
    "c_memcpy": "C, mlx5dv_wr_memcpy",
    "c_memmove": "C, memmove by the CPU",
    "c_strided": "C, through an mkey",
    "c_packed": "C, packed by the CPU",
    "c_dc": "C, one DCI with 16 streams",
    "pyverbs": "pyverbs, one request reused",
    "pyverbs_new": "pyverbs, a request for each",
    "pyverbs_asyncio": "pyverbs, a future for each, on asyncio",
    "ibverbs": "PyPI ibverbs, one request reused",
    "ibverbs_new": "PyPI ibverbs, a request for each",
    "ucxx": "ucxx on asyncio, shared memory",
    "ib_write_lat": "perftest ib_write_lat (half a round trip)",
    "ib_write_bw": "perftest ib_write_bw",
}


@dataclass(frozen=True)
class Contender:
    """``name``: its key. ``left_out``: why it can't take part. ``perftest``: it speaks no protocol."""

    name: str
    command: tuple[str, ...] = ()
    left_out: str | None = None
    perftest: bool = False

    @property
    def title(self) -> str:
        if self.name in TITLES:
            return TITLES[self.name]
        what, _, rest = self.name.partition("_")
        loop, _, how = rest.partition("_")
        if what == "eventfd":  # eventfd_self_uvloop
            return f"bare eventfd, {how}, written by {'the loop itself' if loop == 'self' else 'a thread in C'}"
        extra = {"spin": f", spin {SPIN_US} us", "nospin": ", no spin"}
        for word, text in extra.items():
            if how == word or how.startswith(word + "_"):
                suffix = {
                    "packed": ", packed by numpy",
                    "reposted": ", one batch posted again",
                    "engine": ", DmaEngine.copy()",
                }
                return f"aiordma, {loop}{text}{suffix.get(how.partition('_')[2], '')}"
        return self.name


@dataclass
class Case:
    """One workload. ``reference``: the contender that the others are compared with. ``size``: bytes of an operation, where
    bandwidth is of interest. ``samples``: whether single operations are timed too. ``processes``: so many of each contender
    take turns, where it matters which pages a process happened to get."""

    name: str
    title: str
    contenders: list[Contender]
    reference: str = "c_verbs"
    size: int = 0
    samples: bool = False
    unit: str = "operation"
    group: str = ""
    processes: int = 1
    notes: list[str] = field(default_factory=list)


def build_c() -> None:
    """Compile benchmarks/c against the installed libibverbs."""
    BUILD.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler for the contenders in C (cc or gcc)")
    sources = list((HERE / "c").glob("*"))
    newest = max(path.stat().st_mtime for path in sources)

    def stale(path: Path) -> bool:
        return not path.exists() or path.stat().st_mtime < newest

    for name, libraries in C_PROGRAMS.items():
        if stale(BUILD / name):
            command = [compiler, "-O2", "-Wall", "-Wextra", "-o", BUILD / name, HERE / "c" / f"{name}.c", *libraries]
            subprocess.run(command, check=True)
    if stale(BUILD / "echo.so"):
        command = [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-o", BUILD / "echo.so"]
        subprocess.run([*command, HERE / "c" / "echo.c"], check=True)


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Field:
    """Makes contenders for a device."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def _mlx5(self, needed: bool) -> str | None:
        return "it needs an mlx5 device" if needed and not self._bench.mlx5 else None

    def c(
        self, name: str, program: str, workload: str, size: int, window: int = 1, qps: int = 1, mlx5: bool = False
    ) -> Contender:
        words = (str(BUILD / program), self._bench.device, workload, str(size), str(window), str(qps))
        return Contender(name, words, self._mlx5(mlx5))

    def python(
        self, name: str, program: str, workload: str, size: int, window: int, *rest: str, qps: int = 1
    ) -> Contender:
        words = (str(PROGRAMS / f"{program}.py"), self._bench.device, workload, str(size), str(window), str(qps), *rest)
        return Contender(name, (sys.executable, *words))

    def aiordma(
        self,
        workload: str,
        size: int,
        window: int = 1,
        qps: int = 1,
        *,
        mlx5: bool = False,
        spins: tuple[int, ...] = (SPIN_US, 0),
        loops: tuple[str, ...] = LOOPS,
        suffix: str = "",
    ) -> Iterator[Contender]:
        for loop in loops:
            for spin in spins:
                name = f"aiordma_{loop}_{'spin' if spin else 'nospin'}{suffix}"
                made = self.python(name, "aiordma_program", workload, size, window, loop, str(spin), qps=qps)
                left_out = self._mlx5(mlx5)
                if loop != "asyncio" and not installed(loop):
                    left_out = f"{loop} isn't installed"
                yield Contender(name, made.command, left_out)

    def pyverbs(self, workload: str, size: int, window: int = 1, new: bool = False) -> Iterator[Contender]:
        yield self.python("pyverbs", "pyverbs_program", workload, size, window, "reuse")
        if new:
            yield self.python("pyverbs_new", "pyverbs_program", workload, size, window, "new")

    def naive(self, size: int, window: int = 1) -> Contender:
        return self.python("pyverbs_asyncio", "pyverbs_program", "write", size, window, "await", "asyncio")

    def ibverbs(self, workload: str, size: int, window: int = 1, new: bool = False) -> Iterator[Contender]:
        left_out = None if installed("ibverbs") else "PyPI's ibverbs isn't installed (make bench installs it)"
        for name, how in (("ibverbs", "reuse"), ("ibverbs_new", "new")):
            if how == "reuse" or new:
                made = self.python(name, "ibverbs_program", workload, size, window, how)
                yield Contender(name, made.command, left_out)

    def ucxx(self, size: int) -> Contender:
        made = self.python("ucxx", "ucxx_program", "pingpong", size, 1)
        left_out = None if installed("ucxx") else "ucxx isn't installed (make bench UCX=1 installs it, 350 MB)"
        return Contender("ucxx", made.command, left_out)

    def perftest(self, name: str, size: int, window: int) -> Contender:
        found = shutil.which(name)
        left_out = None if found else f"{name} (perftest) isn't installed"
        words = [found or name, "-F", "-d", self._bench.device, "-x", str(self._bench.gid_index), "-s", str(size)]
        if name == "ib_write_bw":
            # One completion a write, as everybody else.
            words += ["-t", str(window), "-Q", "1"]
        if size <= 64:
            words += ["-I", "64"]
        return Contender(name, tuple(words), left_out, perftest=True)


def spaced(size: str) -> str:
    """64KiB is a name, 64 KiB a text."""
    digits = "".join(c for c in size if c.isdigit())
    return f"{digits} {size[len(digits) :]}"


def groups(cases: list[Case]) -> list[list[Case]]:
    """Workloads that are measured together."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group or case.name, []).append(case)
    return list(found.values())


def cases(bench: Bench) -> list[Case]:
    f = Field(bench)
    return [
        *_writes(f),
        _wake(f),
        *_mlx5(f),
        *_scale(f),
        # The slowest on a machine with few CPUs: last, in case that time runs out.
        *_two_processes(f),
    ]


def _writes(f: Field) -> Iterator[Case]:
    for name, size in (("8B", 8), ("4KiB", 4096), ("64KiB", 65536), ("1MiB", 1 << 20)):
        yield Case(
            f"write_{name}",
            f"RDMA write of {spaced(name)}, awaited one at a time",
            [
                f.c("c_verbs", "verbs", "write", size),
                f.c("c_direct", "direct", "write", size, mlx5=True),
                *f.pyverbs("write", size, new=size == 8),
                f.naive(size),
                *f.ibverbs("write", size, new=size == 8),
                *f.aiordma("write", size),
            ],
            size=size,
            samples=size == 8,
            group="one" if size == 8 else "",
        )
    for window in (16, 100, 1000):
        yield Case(
            f"outstanding_{window}",
            f"RDMA write of 8 B, {window} outstanding, each awaited",
            [
                f.c("c_verbs", "verbs", "write", 8, window),
                f.c("c_direct", "direct", "write", 8, window, mlx5=True),
                *f.pyverbs("write", 8, window, new=window == 100),
                f.naive(8, window),
                *f.ibverbs("write", 8, window, new=window == 100),
                *f.aiordma("write", 8, window),
            ],
            group="outstanding",
        )
    yield Case(
        "batch_64",
        "RDMA write of 8 B, batches of 64 with one doorbell and one completion",
        [
            f.c("c_verbs", "verbs", "batch", 8, 64),
            f.c("c_direct", "direct", "batch", 8, 64, mlx5=True),
            *f.ibverbs("batch", 8, 64, new=True),
            *f.aiordma("batch", 8, 64),
            *f.aiordma("repost", 8, 64, spins=(SPIN_US,), suffix="_reposted"),
        ],
        group="outstanding",
        notes=["pyverbs has no batches here: SendWR.next can't be set in all of its versions."],
    )
    for name, size in (("4KiB", 4096), ("64KiB", 65536), ("1MiB", 1 << 20)):
        yield Case(
            f"bandwidth_{name}",
            f"RDMA write of {spaced(name)}, 16 outstanding",
            [
                f.c("c_verbs", "verbs", "write", size, 16),
                f.c("c_direct", "direct", "write", size, 16, mlx5=True),
                *f.pyverbs("write", size, 16),
                *f.ibverbs("write", size, 16),
                *f.aiordma("write", size, 16, spins=(SPIN_US,)),
            ],
            size=size,
            processes=SEVERAL,
            notes=[IN_TURNS],
        )
    yield Case(
        "pingpong_8B",
        "Send and receive of 8 B, there and back, one message at a time",
        [
            f.c("c_verbs", "pingpong", "pingpong", 8),
            *f.pyverbs("pingpong", 8),
            *f.ibverbs("pingpong", 8),
            *f.aiordma("pingpong", 8),
            f.ucxx(8),
        ],
        unit="message",
    )


def _two_processes(f: Field) -> Iterator[Case]:
    for name, title, size, window in (
        ("8B", "of 8 B to another process, one at a time", 8, 1),
        ("8B_100", "of 8 B to another process, 100 outstanding", 8, 100),
        ("64KiB", "of 64 KiB to another process, 16 outstanding", 65536, 16),
    ):
        yield Case(
            f"processes_{name}",
            f"RDMA write {title}",
            [
                f.c("c_verbs", "verbs", "write2", size, window),
                f.perftest("ib_write_bw", size, window),
                *([f.perftest("ib_write_lat", size, window)] if window == 1 else []),
                *f.aiordma("write2", size, window, loops=("asyncio", "uvloop")),
            ],
            size=size if size > 8 else 0,
        )


def _scale(f: Field) -> Iterator[Case]:
    many = f"{IN_TURNS} aiordma's sends are all on one CQ of 32,767 entries, C's on one of 96."
    for qps in (1, 10, 100, 1000):
        yield Case(
            f"qps_{qps}",
            f"RDMA write of 8 B, 16 outstanding, {qps} queue pair{'s' if qps > 1 else ''} in turn",
            [
                f.c("c_verbs", "verbs", "turns", 8, 16, qps),
                f.c("c_direct", "direct", "turns", 8, 16, qps, mlx5=True),
                *f.aiordma("turns", 8, 16, qps, spins=(SPIN_US,)),
            ],
            group="qps",
            processes=SEVERAL,
            notes=[many],
        )
    for workload, of_what in (("regions", "memory regions"), ("pages", "memory regions, each on a page of its own,")):
        yield Case(
            f"{workload}_10000",
            f"RDMA write of 8 B, 16 outstanding, 1000 queue pairs and 10,000 {of_what} in turn",
            [
                f.c("c_verbs", "verbs", workload, 8, 16, 1000),
                *f.aiordma(workload, 8, 16, 1000, spins=(SPIN_US,)),
            ],
            group="qps",
            processes=SEVERAL,
            notes=[many],
        )
    for tasks in (1, 16, 64, 256):
        yield Case(
            f"tasks_{tasks}",
            f"RDMA write of 8 B, {tasks} task{'s' if tasks > 1 else ''}, each awaiting one at a time",
            [f.c("c_verbs", "verbs", "write", 8, tasks), *f.aiordma("tasks", 8, tasks)],
            group="tasks",
            notes=["C has as many outstanding, and no tasks."],
        )


def _mlx5(f: Field) -> Iterator[Case]:
    yield Case(
        "fanout_64",
        "RDMA write of 8 B to 64 DC targets in turn, 64 outstanding",
        [f.c("c_dc", "dc", "fanout", 8, 64, mlx5=True), *f.aiordma("fanout", 8, 64, mlx5=True, spins=(SPIN_US,))],
        reference="c_dc",
    )
    for name, size, window in (
        ("64KiB", 65536, 1),
        ("64KiB_8", 65536, 8),
        ("1MiB", 1 << 20, 1),
        ("1MiB_8", 1 << 20, 8),
    ):
        many = f"{window} in flight" if window > 1 else "one at a time"
        yield Case(
            f"memcpy_{name}",
            f"Copy of {spaced(name.split('_')[0])} by the device, {many}",
            [
                f.c("c_memcpy", "memcpy", "memcpy", size, window, mlx5=True),
                f.c("c_memmove", "memcpy", "memmove", size),
                *f.aiordma("memcpy", size, window, mlx5=True, spins=(SPIN_US,)),
                *(f.aiordma("copy", size, mlx5=True, spins=(SPIN_US,), suffix="_engine") if window == 1 else ()),
            ],
            reference="c_memcpy",
            size=size,
            processes=SEVERAL,
            notes=[IN_TURNS],
        )
    yield Case(
        "strided_64KiB",
        "RDMA write of a block of a matrix, 64 KiB in rows of 256 B, 4 outstanding",
        [
            f.c("c_strided", "strided", "strided", 65536, 4, mlx5=True),
            f.c("c_packed", "strided", "packed", 65536, 4, mlx5=True),
            *f.aiordma("strided", 65536, 4, mlx5=True, spins=(SPIN_US,)),
            *f.aiordma("packed", 65536, 4, mlx5=True, spins=(SPIN_US,), suffix="_packed"),
        ],
        reference="c_strided",
        size=65536,
        processes=SEVERAL,
        notes=[IN_TURNS],
    )


def _wake(f: Field) -> Case:
    bare = []
    for loop in LOOPS:
        for how in ("self", "thread"):
            name = f"eventfd_{how}_{loop}"
            made = f.python(name, "wake_program", f"wake_{how}", 8, 1, loop, str(BUILD / "echo.so"))
            left_out = None if loop == "asyncio" or installed(loop) else f"{loop} isn't installed"
            bare.append(Contender(name, made.command, left_out))
    return Case(
        "wake",
        "Woken through a descriptor: a bare eventfd, and a write without spin, one at a time",
        [f.c("c_verbs", "verbs", "write", 8), *bare, *f.aiordma("write", 8, spins=(0,))],
        group="one",
        notes=["C polls; it's here to show what the device takes of it."],
        unit="round trip",
    )
