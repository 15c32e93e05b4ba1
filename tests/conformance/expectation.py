"""What a run of rdma-core's tests is expected to give, for each version of them; and what skipped tests lack.

``expected/VERSION.json`` is such a run as ``report.py`` wrote it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from conformance.suite import PASSED, SKIPPED, Outcome

__all__ = ["Run", "regressions", "why_skipped"]

FOLDER = Path(__file__).with_name("expected")

#: What a skip means, by the module or the reason that the test gives. Whatever comes first.
WHY = (
    (r"^test_efa", "for Amazon's EFA, another vendor's device"),
    (r"^test_(irdma|.*dmah)", "for another device or kernel"),
    (r"^test_mlx5_vfio", "VFIO, a driver in user space for a PCI device, isn't emulated"),
    (r"^test_mlx5_crypto", "encryption isn't emulated"),
    (r"^test_tag_matching", "tag matching isn't emulated"),
    (r"^test_mlx5_dr|^test_mlx5_flow|^test_flow|^test_rss", "raw packets and flow steering aren't emulated"),
    (r"cuda|[Dd]mabuf|dmabuf", "needs a GPU and its driver"),
    (r"QP type 8|Raw [Pp]acket|flow table|raw qp", "raw packets and flow steering aren't emulated"),
    (r"odp|ODP|additional access flags 64", "on-demand paging isn't emulated"),
    (r"huge pages", "the machine has no huge pages set aside"),
    (r"[Mm]ulticast is not supported", "multicast isn't emulated"),
    (r"reserved QP|dc_external_qp SkipTest", "queue pair numbers can't be reserved"),
    (r"mkey_sig|signature", "signature offload isn't emulated"),
    (r"compression", "CQE compression isn't emulated"),
    (r"LAG|lag", "the emulated ports don't form a LAG"),
    (r"[Ss]chedul|sched elem", "scheduling trees of traffic (QoS) aren't emulated"),
    (r"AH to QP", "mapping address handles to queue pairs isn't emulated"),
    (r"UDP sport", "the source port of RoCE v2 packets isn't emulated, nor can it be set"),
    (r"rc_atomic_write", "libmlx5 has no atomic write"),
    (r"[Ff]lush", "libmlx5 has no flush operation"),
    (r"doorbell_less", "send queues without doorbell records aren't emulated"),
    (r"SRQ resize", "mlx5 devices don't resize SRQs"),
    (r"rdma_ctrl", "privileges of RDMA control (UCAPs) aren't emulated"),
    (r"scapy", "needs the package scapy"),
    (r"[Oo]ut.of.order|OOO|ooo_", "out-of-order data placement isn't emulated"),
    (r"data.direct", "needs a data-direct device"),
)


def why_skipped(outcome: Outcome) -> str | None:
    """Say what a skipped test lacks; ``None`` if nobody has looked into it."""
    text = f"{outcome.module} {outcome.test} {outcome.reason}"
    return next((why for pattern, why in WHY if re.search(pattern, text)), None)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of all modules."""

    version: str
    #: Distribution and Python.
    system: str
    outcomes: tuple[Outcome, ...]

    def by_module(self) -> dict[str, list[Outcome]]:
        """Return the outcomes of each module."""
        modules: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            modules[outcome.module].append(outcome)
        return dict(modules)

    def save(self) -> Path:
        """Write it to the folder of expectations."""
        modules = {
            module: {o.test: o.result if o.result == PASSED else [o.result, o.reason] for o in outcomes}
            for module, outcomes in self.by_module().items()
        }
        path = FOLDER / f"{self.version}.json"
        path.write_text(json.dumps({"system": self.system, "modules": modules}, indent=1, sort_keys=True) + "\n")
        return path

    @classmethod
    def load(cls, version: str) -> Run | None:
        """Read the expectation for a version, if there is one."""
        path = FOLDER / f"{version}.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        outcomes = [
            Outcome(module, test, *([result] if isinstance(result, str) else result))
            for module, tests in content["modules"].items()
            for test, result in tests.items()
        ]
        return cls(version, content["system"], tuple(outcomes))

    @classmethod
    def load_all(cls) -> list[Run]:
        """Read all of them, the oldest version first."""
        versions = sorted((path.stem for path in FOLDER.glob("*.json")), key=float)
        return [run for run in map(cls.load, versions) if run is not None]


def regressions(module: str, outcomes: list[Outcome], expected: Run | None) -> list[str]:
    """Compare a module's outcomes: what failed, and what passed once and no longer does.

    Of a version that there's no expectation for, nothing may fail.
    """
    found = {o.test: o for o in outcomes}
    wrong = [f"{o.test} {o.result}:\n{o.reason}" for o in outcomes if o.result not in (PASSED, SKIPPED)]
    for before in expected.by_module().get(module, []) if expected else []:
        now = found.get(before.test)
        if before.result != PASSED or (now and now.result != SKIPPED):
            continue
        wrong.append(f"{before.test} passed and is now {'skipped: ' + now.reason if now else 'not there'}")
    return wrong
