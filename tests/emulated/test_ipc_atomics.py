"""Atomics of several processes on the same memory."""

from pathlib import Path

from emulated.ipc import connect, processes


def test_atomics_of_three_processes_on_one_word(tmp_path: Path) -> None:
    """Two processes and the owner itself add to a word, and swap another: no addition is lost."""
    n = 400
    with processes(tmp_path, 3) as (owner, a, b):
        connect(a, owner, name="one")
        connect(b, owner, name="two")
        owner("own = End()\npeer = End()\nown.connect(peer)\npeer.connect(own)\nNone")
        owner("one.mr.write(bytes(64), 64)\nNone")
        target = owner("describe(one)")
        # All of them aim at the memory of `one`; each through a QP of its own whose domain must have it.
        owner(
            f"import ctypes\n"
            f"from pyverbs.mr import MR\n"
            f"mrs = [MR(x.pd, 64, ALL_ACCESS, {target['buf']}) for x in (two, peer)]\nNone"
        )
        keys = owner("[m.rkey for m in mrs]")
        work = (
            "def work(end, far, key, address):\n"
            "    wrs = 0\n"
            f"    for i in range({n}):\n"
            "        while True:\n"
            "            end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8), peer=far, rkey=key, atomic=(1, 0),\n"
            "                     offset=address - far.mr.buf)\n"
            "            ok(end.sent(60))\n"
            "            old = struct.unpack('Q', end.read(8))[0]\n"
            "            break\n"
            "        value = 0\n"
            "        while True:\n"
            "            end.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, end.sge(8), peer=far, rkey=key,\n"
            "                     atomic=(value, value + 1), offset=address + 8 - far.mr.buf)\n"
            "            ok(end.sent(60))\n"
            "            seen = struct.unpack('Q', end.read(8))[0]\n"
            "            if seen == value: break\n"
            "            value = seen\n"
            "    return old\n"
        )
        for p in (owner, a, b):
            p(work + "None")
        a.start(f"work(one, far_one, {target['rkey']}, {target['buf']})")
        b.start(f"work(two, far_two, {keys[0]}, {target['buf']})")
        owner.start(f"work(own, peer, {keys[1]}, {target['buf']})")
        for p in (a, b, owner):
            p.result()
        assert owner("list(struct.unpack('QQ', one.read(16)))") == [3 * n, 3 * n]
