"""Ranks that outlive their notebook's kernel, which is killed at random moments.

A test prints the seed of its moments. `NBDIST_SEED=1234 pytest FILE` repeats them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator

import pytest

from tests.notebook.test_kernel import Notebook, Reply, is_there
from tests.notebook.test_widgets_in_kernel import FrontEnd
from tests.seed import SEED

STEPS = 200
TRAINING = f"""%%distributed
import time
model = torch.nn.Linear(4, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range({STEPS}):
    loss = ddp(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    nbdist.log(step=step, loss=loss.item())
    if rank == 0:
        print("step", step)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def kept_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        notebook = Notebook(folder)
        yield notebook
        notebook.run("import nbdist\n%load_ext nbdist")
        notebook.run("%dist_clusters --stop training")
        notebook.close()


def steps_in(reply: Reply) -> list[int]:
    """The steps that the last display of a cell shows."""
    return [int(n) for n in re.findall(r"step (\d+)", reply.text)]


def has_ended(reply: Reply) -> bool:
    return "finished in" in reply.text


def end_kernel(notebook: Notebook, *, by_kill: bool) -> None:
    """End the kernel, and start another one, as a notebook's restart button does.

    Args:
        by_kill: Interrupt and kill the kernel. Otherwise it is interrupted and asked.
    """
    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=by_kill)
    notebook._connect()
    notebook.run("import nbdist\n%load_ext nbdist")


def run_rounds(notebook: Notebook, rounds: int) -> None:
    """End the kernel in each round at a random moment, and attach from the next one."""
    moments, followed = random.Random(SEED), 0
    notebook.run("import nbdist\n%load_ext nbdist")
    started = notebook.run("%dist_start -n 2 --device cpu --keep 1 --name training")
    assert "training is kept" in started.stdout
    for number in range(rounds):
        notebook.run(f"%%distributed\nround_number = {number}")
        notebook.send(TRAINING)
        time.sleep(moments.uniform(0.0, 0.015 * STEPS))  # a random moment
        end_kernel(notebook, by_kill=moments.random() < 0.7)
        request, reply = notebook.start("%dist_attach training")
        assert "attached to training: 2 ranks" in reply.text, reply.text
        if steps_in(reply) or "follows" in reply.text:
            followed += 1
            notebook.read(request, reply, has_ended)
            assert list(dict.fromkeys(steps_in(reply))) == list(range(STEPS))
            loss = notebook.run("len(nbdist.metrics('loss').query('rank == 1'))")
            assert loss.displays[-1]["text/plain"] == str(STEPS)
        found = notebook.run("%dist_inspect round_number").text
        assert str(number) in found
        notebook.run("nbdist.cluster().collector.clear()")
    notebook.run("%dist_stop")
    # In the others, the kernel was killed before it had begun the cell, or after it.
    assert followed >= rounds // 2


def test_no_step_is_lost_when_the_kernel_is_killed(kept_notebook: Notebook):
    run_rounds(kept_notebook, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quarter", range(4))
def test_no_step_is_lost_in_a_hundred_kills(kept_notebook: Notebook, quarter: int):
    run_rounds(kept_notebook, 25)


STOPS = """%%distributed
total = 41 + rank
if rank == 1:
    breakpoint()
print("after", total)
"""


def test_a_debugger_asks_in_the_notebook_and_lets_go_when_the_kernel_is_killed(
    kept_notebook: Notebook,
):
    notebook = kept_notebook
    notebook.run("%dist_start -n 2 --device cpu --keep 1 --name training")
    reply, prompts = notebook.converse(STOPS, "p total", "c")
    assert prompts == ["[1] (Pdb) "] * 2
    assert "debugger on rank 1 of 2" in reply.text
    assert "[1] 42" in reply.text
    assert "[1] after 42" in reply.text
    press = notebook.manager.interrupt_kernel
    reply, _ = notebook.converse(STOPS, press)
    assert reply.error == "CellInterrupted"
    notebook.send(STOPS)
    assert notebook.client.get_stdin_msg(timeout=60)["content"]["prompt"]
    end_kernel(notebook, by_kill=True)
    request, reply = notebook.start("%dist_attach training")
    notebook.read(request, reply, is_there("[1] after 42"))
    assert "(no notebook is attached)" in reply.text


SLIDERS = """%%distributed
import ipywidgets
from tqdm.auto import tqdm
for step in tqdm(range(30)):
    pass
slider = ipywidgets.IntSlider(value=3)
slider.observe(lambda change: print("now", change.new), "value")
slider
"""


def test_widgets_are_live_also_after_the_kernel_was_killed(kept_notebook: Notebook):
    notebook = kept_notebook
    notebook.run("import nbdist\n%load_ext nbdist")
    notebook.run("%dist_clusters --stop training")
    notebook.run("%dist_start -n 2 --device cpu --keep 1 --name training")
    front_end = FrontEnd(notebook)
    cell = front_end.run(SLIDERS)
    bars = front_end.of("FloatProgress")
    assert [front_end.states[bar]["value"] for bar in bars] == [30, 30]
    names = front_end.text(front_end.run("%%distributed\nprint(slider.model_id)"))
    first, second = (line.split()[1] for line in sorted(names.splitlines()))
    front_end.set(second, value=8)
    front_end.until(lambda: "[1] now 8" in front_end.text(cell))
    front_end.run("%%distributed -r 0\nslider.value = 5")
    assert front_end.states[first]["value"] == 5

    end_kernel(notebook, by_kill=True)
    front_end = FrontEnd(notebook)
    front_end.run("%dist_attach training")
    front_end.until(lambda: {first, second} <= front_end.states.keys())
    front_end.until(lambda: front_end.states[first]["value"] == 5)
    front_end.until(lambda: front_end.states[second]["value"] == 8)
    cell = front_end.run("%%distributed\nslider")
    front_end.set(second, value=9)
    front_end.until(lambda: "[1] now 9" in front_end.text(cell))
    front_end.run("%dist_stop")
    front_end.until(lambda: not {first, second} & front_end.states.keys())
