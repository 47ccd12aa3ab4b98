"""Ranks on two hosts that share no file, for a notebook on one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork

START = """
import json, os, signal, threading, time
import numpy as np
import nbdist
notes = []
cluster = nbdist.Cluster(hosts="a:2,b:2", device="cpu", timeout_s=90)
cluster.on_note = notes.append
cluster.start()

def printed(code, **options):
    return [each.stdout.strip() for each in cluster.execute(code, **options)]

cluster.execute("import os", setup=True)
"""


@pytest.fixture(scope="module")
def console(_network: HostNetwork) -> Iterator[Console]:
    _network.ready()
    with _network["a"].console() as console:
        console.do(START)
        yield console
        console.do("cluster.stop()")
    for name in ("a", "b"):
        assert _network[name].processes() == []
        assert _network[name].left_behind() == set()


def test_ranks_are_numbered_by_host(console: Console):
    assert console.value(
        "[(i.rank, i.host, i.local_rank, i.local_world_size) for i in cluster.infos]"
    ) == [(0, "a", 0, 2), (1, "a", 1, 2), (2, "b", 0, 2), (3, "b", 1, 2)]
    assert console.value("printed('print(os.uname().nodename)')") == [
        *["a", "a"],
        *["b", "b"],
    ]


def test_all_ranks_are_forked(console: Console):
    assert console.value("[info.started for info in cluster.infos]") == ["forked"] * 4


# Before a test makes a group of gloo, which opens ports of its own.
@pytest.mark.parametrize(("name", "address"), [("a", "10.77.0.1"), ("b", "10.77.0.2")])
def test_only_the_hosts_of_the_ranks_can_connect(
    console: Console, hosts: HostNetwork, name: str, address: str
):
    console.do("cluster.execute('nbdist.barrier()')")
    ports = hosts[name].open_ports()
    other = {"a": "b", "b": "a"}[name]
    reached = hosts[other].reached(address, ports)
    assert reached
    # Some systems let no ordinary user limit who connects; the start says so.
    may_limit = "__import__('nbdist.ipc.ports').ipc.ports.may_limit_sources()"
    said = [note for note in console.value("notes") if "CAP_NET_ADMIN" in note]
    if console.value(may_limit):
        assert said == []
        assert hosts["c"].reached(address, ports) == []
    else:
        assert said[0].startswith("a, b: any host of the ranks' network can connect")
        assert hosts["c"].reached(address, ports) == reached


READ = "exec 3<>/dev/tcp/127.0.0.1/$0; read -t 2 -N 1 -u 3; echo $?"
"""Prints 1 if the connection was closed, and more than 128 if it is open."""


def test_no_other_user_of_a_host_reaches_the_launcher(
    console: Console, hosts: HostNetwork
):
    (row,) = [
        line
        for line in hosts["b"].run("ss", "-Hlntp", as_root=True).stdout.splitlines()
        if "nbdist agent" in line
    ]
    port = row.split()[3].rpartition(":")[2]
    other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    assert int(hosts["b"].run("bash", "-c", READ, port).stdout) > 128
    stranger = hosts["b"].run(*other, "bash", "-c", READ, port, as_root=True)
    assert stranger.stdout == "1\n"
    assert console.value("printed('print(1)')") == ["1"] * 4


def test_cells_print_and_fail_with_the_rank_and_the_line(console: Console):
    assert console.value("printed('x = rank * 2\\nprint(x)')") == ["0", "2", "4", "6"]
    error = console.error("cluster.execute('y = 1\\nif rank == 3: 1 / 0', number=7)")
    assert "ZeroDivisionError" in error
    assert "rank 3" in error


def test_much_output_arrives_complete_and_in_order(console: Console):
    console.do("lines = printed('for i in range(20000): print(i)')")
    assert console.value(
        "[each.split() == list(map(str, range(20000))) for each in lines]"
    )


def test_values_travel_to_all_hosts_and_back(console: Console):
    console.do(
        "big = np.arange(3_000_000, dtype=np.float32)\n"
        "cluster.push(big=big, small=[1, 'two'])\n"
        "sums = cluster['(float(big.sum()), small)']\n"
        "back = cluster['big + rank']"
    )
    assert console.value("sums == [(float(big.sum()), [1, 'two'])] * 4")
    assert (
        console.value("[bool((v == big + r).all()) for r, v in enumerate(back)]")
        == [True] * 4
    )


@pytest.mark.parametrize("small", ["a", "b"])
def test_a_value_travels_where_shared_memory_has_no_room(
    console: Console, hosts: HostNetwork, small: str
):
    size = "mount -o remount,size={} /dev/shm"
    used = "$(($(df -B1 --output=used /dev/shm | tail -1) + 1000000))"
    hosts[small].run("sh", "-c", size.format(used), as_root=True)
    try:
        console.do("cluster.push(big=np.ones(2_000_000))")
        assert (
            console.value("[int(v.sum()) for v in cluster['big']]") == [2_000_000] * 4
        )
    finally:
        before = hosts[small].traits.shared_memory
        hosts[small].run("sh", "-c", size.format(before), as_root=True)


def test_no_file_of_a_value_is_left(console: Console, hosts: HostNetwork):
    console.do("cluster.push(v=np.zeros(1_000_000)); cluster['v * 1.0']")
    for name in ("a", "b"):
        found = hosts[name].run("find", "/dev/shm", "-name", "tmp*").stdout
        assert found == ""


def test_the_ranks_of_a_host_map_one_file_of_a_value(console: Console):
    console.do(
        "cluster.push(w=np.ones(2_000_000))\n"
        "find = r'''import re\n"
        "text = open('/proc/self/maps').read()\n"
        "found = re.findall(r'(\\d+) +/dev/shm/nbdist\\S+/tmp', text)\n"
        "print(max(map(int, found)))'''\n"
        "inodes = printed(find)"
    )
    inodes = console.value("inodes")
    assert inodes[0] == inodes[1]
    assert inodes[2] == inodes[3]


def test_functions_run_on_ranks(console: Console):
    console.do(
        "def where(add):\n    import socket\n    return socket.gethostname() + add"
    )
    assert console.value("cluster.run(where, '!')") == ["a!", "a!", "b!", "b!"]
    assert console.value("cluster.on([1, 2]).run(where, '')") == ["a", "b"]


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_collectives_give_equal_bits_on_all_ranks(console: Console, size: int):
    console.do(
        f"r = printed('''torch.manual_seed(rank)\n"
        f"x = torch.randn({size})\n"
        "mine = x.clone(); nbdist.all_reduce(x)\n"
        "rows = [torch.empty_like(mine) for _ in range(4)]\n"
        "dist.all_gather(rows, mine)\n"
        "exact = torch.stack(rows).double().sum(0)\n"
        "assert (x - exact).abs().max() < 1e-5\n"
        "import hashlib; print(hashlib.sha1(x.numpy().tobytes()).hexdigest())''')"
    )
    assert console.value("len(set(r))") == 1


def test_messages_between_hosts(console: Console):
    assert console.value(
        "printed('''t = torch.full((5,), float(rank))\n"
        "if rank == 0: dist.send(t, 3)\n"
        "if rank == 3: dist.recv(t, 0); print(t.sum().item())''')"
    ) == ["", "", "", "0.0"]


def test_gloo_groups_that_a_cell_makes_reach_the_other_host(console: Console):
    assert (
        console.value(
            "printed('''g = dist.new_group(backend='gloo')\n"
            "t = torch.ones(3); dist.all_reduce(t, group=g); print(t[0].item())\n"
            "dist.destroy_process_group(g)''')"
        )
        == ["4.0"] * 4
    )


def test_master_addr_is_reachable_from_all_hosts(console: Console):
    found = console.value("printed('print(os.environ[\"MASTER_ADDR\"])')")
    assert found == ["10.77.0.1"] * 4


def test_ddp_trains_to_equal_weights(console: Console):
    console.do(
        "r = printed('''torch.manual_seed(rank)\n"
        "net = torch.nn.Linear(20, 3)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(net)\n"
        "opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\n"
        "for step in range(5):\n"
        "    loss = ddp(torch.randn(8, 20)).square().mean()\n"
        "    opt.zero_grad(); loss.backward(); opt.step()\n"
        "    nbdist.log(step=step, loss=loss.item())\n"
        "print(net.weight.sum().item())''')"
    )
    assert console.value("len(set(r))") == 1
    assert console.value(
        "sorted(cluster.metrics('loss').groupby('rank').size().to_dict().items())"
    ) == [(rank, 5) for rank in range(4)]


def test_no_key_is_on_a_command_line_or_in_an_environment(
    console: Console, hosts: HostNetwork
):
    folder = "cluster._run_dir / 'security' / 'ipcontroller-engine.json'"
    key = console.value(f"json.loads(({folder}).read_text())['key']")
    for name in ("a", "b"):
        everything = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n'"
        assert key not in hosts[name].run("sh", "-c", everything).stdout
        logs = hosts[name].run("sh", "-c", "cat /tmp/nbdist-*/*.log", check=False)
        assert key not in logs.stdout


def test_a_mismatch_names_the_ranks(console: Console):
    error = console.error(
        "cluster.execute('nbdist.all_reduce(torch.ones(3 if rank == 2 else 4))')"
    )
    assert "CollectiveMismatch" in error


def test_an_interrupt_ends_a_cell_that_waits_on_both_hosts(console: Console):
    console.do(
        "def interrupt_soon():\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt_soon).start()"
    )
    error = console.error("cluster.execute('import time\\ntime.sleep(3600)')")
    assert "interrupted" in error
    assert "did not react" not in error
    assert console.value("printed('print(1)')") == ["1"] * 4


def test_a_rank_that_does_not_come_is_named_at_once(console: Console):
    error = console.error("cluster.execute('if rank != 3: nbdist.barrier()')")
    assert "rank 3" in error
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 4


def test_status_and_history_show_ranks_of_both_hosts(console: Console):
    console.do("cluster.execute('nbdist.all_reduce(torch.ones(2))')")
    assert (
        console.value("[s is not None for s in cluster.status().values()]")
        == [True] * 4
    )
    text = console.value("str(cluster.collectives())")
    assert "all_reduce(sum, float32, (2,))" in text
    assert console.value("sorted(cluster.collectives(count=1).rows[-1].calls)") == [
        *range(4)
    ]


def test_a_rank_on_another_host_that_dies_is_replaced_there(console: Console):
    console.do("cluster.execute('kept = rank + 10'); notes.clear()")
    error = console.error(
        "cluster.execute('if rank == 3: os.kill(os.getpid(), 9)\\nnbdist.barrier()')"
    )
    assert "rank 3" in error
    assert "on b" in error
    assert "SIGKILL" in error
    assert console.value("[(i.rank, i.host) for i in cluster.infos]") == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b"),
    ]  # fmt: skip
    # The newcomer has the variables of rank 0, which is on the other host.
    assert console.value("cluster['kept']") == [10, 11, 12, 10]
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 4


def test_the_error_of_a_dead_rank_has_its_last_lines(console: Console):
    console.do(
        "code = 'if rank == 2:\\n    os.write(2, b\"no more paper\"); os._exit(3)\\n'\n"
        "result = cluster.execute(code + 'nbdist.barrier()', check=False)"
    )
    failure = console.value("repr(result[2].failure)")
    assert "exit code 3" in failure
    assert "no more paper" in failure
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 4


def test_a_crash_on_another_host_has_its_line(console: Console):
    code = "import ctypes\nif rank == 3:\n    ctypes.string_at(0)\nnbdist.barrier()"
    console.do(f"result = cluster.execute({code!r}, check=False, number=8)")
    failure = console.value("repr(result[3].failure)")
    assert "SIGSEGV in In[8] line 3" in failure
    assert "string_at" in failure
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 4


def test_what_a_rank_says_last_is_not_torchs_warning(console: Console):
    warning = (
        "[W1127 10:11:12.131415926 socket.cpp:207] [c10d] The hostname of the client "
        "socket cannot be retrieved. err=-3"
    )
    code = (
        f"import os\nos.write(2, b'mine\\n' + {warning.encode()!r} + b'\\n')\n"
        "if rank == 3: os._exit(5)\nnbdist.barrier()"
    )
    console.do(f"result = cluster.execute({code!r}, check=False)")
    assert "hostname" not in console.value("repr(result[3].failure)")
    assert "mine" in console.value("repr(result[3].failure)")
    assert console.value("result[2].stderr") == "mine\n"


def test_the_history_of_both_hosts_is_saved(console: Console, hosts: HostNetwork):
    console.do("cluster.execute('nbdist.all_reduce(torch.ones(2))')")
    console.do("files = cluster.collectives().save('/var/tmp/history')")
    assert len(console.value("[str(file) for file in files]")) == 4
    found = hosts["a"].run("grep", "-rla", "all_reduce", "/var/tmp/history").stdout
    assert len(found.splitlines()) == 4
    hosts["a"].run("rm", "-r", "/var/tmp/history")


def test_the_world_grows_and_shrinks_over_hosts(console: Console):
    console.do("cluster.scale(3)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b"]
    console.do("cluster.scale(4)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b", "b"]
    assert "free" in console.error("cluster.scale(5)")
    assert console.value("printed('nbdist.barrier(); print(rank)')") == [*"0123"]
