"""The ipyparallel engine that a rank becomes."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import warnings
from dataclasses import replace
from typing import Any

import ipyparallel.engine.app
import torch
import torch.distributed as dist
from ipykernel.kernelapp import IPKernelApp
from ipyparallel.engine.app import IPEngine
from mpi4py import MPI
from torch.optim.optimizer import register_optimizer_step_post_hook
from traitlets.config import Config

import nbdist
from nbdist.collectives.before_mpi import unknown_version
from nbdist.collectives.call_timing import fastest_call
from nbdist.config import OutputConfig
from nbdist.engine import (
    cell_names,
    cells,
    comms,
    debugger,
    elastic,
    ipykernel_debugger,
    main_thread,
    rank,
    rpc_server,
    shell_commands,
    standard_input,
    start_method,
    text_bars,
    torch_loaders,
)
from nbdist.engine.interrupts import Interrupts
from nbdist.engine.output import Output
from nbdist.engine.world import World
from nbdist.ipc import folders, serialization, worker_pickling
from nbdist.ipc.bare_application import BareApplication
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.fork_messages import RANK_PARENT, STARTED
from nbdist.ipc.host_sockets import HOST, RANK_PROXY
from nbdist.ipc.process_files import Process
from nbdist.ipc.resources import host_name
from nbdist.telemetry import internal_metrics
from nbdist.telemetry.recorder import Recorder
from nbdist.telemetry.sampler import Sampler
from nbdist.wire import (
    COMMS,
    ELASTIC,
    INPUT,
    TELEMETRY,
    Batch,
    CommBatch,
    CommMessage,
    InputRequest,
    Notice,
    RankInfo,
    Sample,
)

__all__ = ["run_engine"]

REGISTRATION_TIMEOUT_S = 60


class _KernelApp(BareApplication, IPKernelApp):  # type: ignore[misc]
    """The application that ipyparallel makes for the kernel of its engine."""

    def init_code(self) -> None:
        """Do nothing, because there is no code to run before the first cell.

        IPython would also keep the names of all modules, for a `%reset --aggressive`
        that removes the modules imported since. A rank needs those of nbdist.
        """


class _Engine(BareApplication, IPEngine):  # type: ignore[misc]
    """An ipyparallel engine with nbdist's output, signals and requests."""

    def __init__(self, **kwargs: Any) -> None:
        self.process: Process = kwargs.pop("process")
        self.interrupts = Interrupts()
        self.rank_info: RankInfo = kwargs.pop("rank_info")
        self.device: torch.device = kwargs.pop("device")
        self.assignment: DeviceAssignment = kwargs.pop("assignment")
        super().__init__(**kwargs)

    def load_connection_file(self) -> None:
        super().load_connection_file()
        # The notebook knows by the session which engine has sent a message.
        self.session = rpc_server.RankSession(parent=self, session=self.ident)

    async def complete_registration(self, *args: Any, **kwargs: Any) -> None:
        """Called by IPEngine with the controller's answer. Makes the kernel."""
        ipyparallel.engine.app.IPKernelApp = _KernelApp
        # ipyparallel uses it, which is an error under PYTHONWARNINGS=error.
        warnings.filterwarnings("ignore", "Kernel.shell_streams is deprecated")
        with ipykernel_debugger.unused():
            await super().complete_registration(*args, **kwargs)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Called by IPEngine once its kernel is made and before it runs."""
        kernel = self.kernel
        session, shell = kernel.session, kernel.shell

        def publish(name: str, text: str) -> None:
            content = {"name": name, "text": text}
            parent = kernel.get_parent("shell")
            session.send(iopub_socket, "stream", content, parent=parent)

        def report(batch: Batch) -> None:
            # The notebook waits for what has the request as its parent.
            logged = any(isinstance(record, Sample) for record in batch.records)
            parent = kernel.get_parent("shell") if logged else None
            frames = [pickle.dumps(batch, 5)]
            session.send(iopub_socket, TELEMETRY, {}, parent=parent, buffers=frames)

        def notify(notice: Notice | InputRequest) -> None:
            kind = ELASTIC if isinstance(notice, Notice) else INPUT
            parent = kernel.get_parent("shell")
            frames = serialization.dumps(notice)
            session.send(iopub_socket, kind, {}, parent=parent, buffers=frames)

        def relay(messages: tuple[CommMessage, ...]) -> None:
            batch = CommBatch(rank.this_rank().info.rank, messages)
            frames = serialization.dumps(batch)
            session.send(iopub_socket, COMMS, {}, buffers=frames)

        run_dir = self.process.run_dir
        output = Output(publish, self.process.captured, run_dir / "output")
        sys.stdout, sys.stderr = output.stdout, output.stderr
        info = self.rank_info
        recorder = Recorder(info.rank, report)
        internal_metrics.set_recorder(recorder)
        cell_names.name_by_number(shell)
        cells.arm(shell, self.interrupts)
        shell_commands.install(shell, self.interrupts)
        standard_input.install()
        debugger.install()
        if OutputConfig.from_environment().widgets:
            comms.install(relay)
        else:
            text_bars.install()
        rank.become(
            rank.Rank(
                info=replace(info, engine_uuid=self.ident),
                shell=shell,
                output=output,
                interrupts=self.interrupts,
                recorder=recorder,
                assignment=self.assignment,
                run_dir=run_dir,
                notify=notify,
            )
        )
        # IPython sets these as an interactive shell does. Where they are set, libraries
        # such as Lightning start ranks of their own, or refuse to train.
        vars(sys).pop("ps1", None)
        vars(sys).pop("ps2", None)
        # ipyparallel's publisher of data would validate the header of each request.
        vars(shell).pop("_data_pub", None)
        _keep_names(shell, self.device)
        worker_pickling.install(shell.user_global_ns)
        start_method.prefer_fork()
        rpc_server.answer_on(kernel, self.device)
        elastic.install_coordinator()
        register_optimizer_step_post_hook(_count_step)
        torch_loaders.follow(recorder.loops)
        splitter = main_thread.splitter()
        self.sampler = Sampler(
            recorder,
            info.device,
            info.device_uuid,
            splitter,
            fastest_call,
            ranks_on_host=info.local_world_size,
        )

    def init_signal(self) -> None:
        super().init_signal()
        self.interrupts.install()


def _count_step(optimizer: object, *_arguments: object) -> None:
    if not torch.compiler.is_compiling():  # a count would be compiled with the step
        rank.this_rank().recorder.count_step(optimizer)


def run_engine(
    process: Process, world: World, assignment: DeviceAssignment, device: torch.device
) -> None:
    """Register with the controller, and answer requests until the rank ends."""
    info = _describe(process, world, assignment, device)
    security = process.run_dir / "security"
    config = Config()
    if world.generation == 0:  # later, a dead engine may still have the number
        config.IPEngine.id = world.rank
    config.IPEngine.enable_nanny = False
    config.IPEngine.timeout = REGISTRATION_TIMEOUT_S
    # 0: the engine does not watch the controller's heartbeat, for which it would open a
    # port. A suspended laptop must not end ranks, and the process supervisor ends them
    # when the notebook dies.
    config.IPEngine.max_heartbeat_misses = 0
    config.IPEngine.wait_for_url_file = REGISTRATION_TIMEOUT_S
    config.IPEngine.url_file = str(security / "ipcontroller-engine.json")
    config.IPEngine.log_level = logging.ERROR
    config.HistoryManager.enabled = False  # no database; the cells are in memory
    # The default is the folder in which ipyparallel's module was imported.
    config.IPEngine.work_dir = folders.current()
    config.ProfileDir.location = str(process.run_dir)
    _Engine.launch_instance(
        argv=[],
        config=config,
        process=process,
        rank_info=info,
        device=device,
        assignment=assignment,
    )


def _describe(
    process: Process, world: World, assignment: DeviceAssignment, device: torch.device
) -> RankInfo:
    library = MPI.Get_library_version()
    limit = None
    proxy = os.environ.get(RANK_PROXY)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = assignment.memory_fraction(total)
        limit = None if fraction is None else round(fraction * total)
    return RankInfo(
        rank=world.rank,
        world_size=world.size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        engine_uuid="",
        host=os.environ.get(HOST) or host_name(),
        pid=os.getpid(),
        parent_pid=int(proxy or os.environ[RANK_PARENT]),
        watched_pid=int(proxy or os.getpid()),
        interface=assignment.interface,
        started=os.environ.get(STARTED, ""),
        name=process.name,
        device=str(device),
        device_name=assignment.gpu_name,
        device_uuid=assignment.gpu_uuid,
        memory_limit=limit,
        threads=assignment.threads,
        transport=world.group.describe(),
        generation=world.generation,
        notes=(*process.notes, *filter(None, [unknown_version(library)])),
        mpi=library.splitlines()[0].split(",")[0].strip(),
    )


def _keep_names(shell: Any, device: torch.device) -> None:
    """Put the names of every cell into the namespace, now and after each `%reset`."""
    reset = shell.init_user_ns

    def init_user_ns() -> None:
        reset()
        fill()

    def fill() -> None:
        _fill_namespace(shell, device)
        rank.this_rank().tell_namespace()

    shell.init_user_ns = init_user_ns
    fill()


def _fill_namespace(shell: Any, device: torch.device) -> None:
    """Put the names of every cell into the namespace, hidden from %who."""
    names = {
        "device": device,
        "torch": torch,
        "dist": dist,
        "nbdist": nbdist,
    }
    shell.push(names, interactive=False)
    # IPython's own functions would end the engine; these end the cell.
    shell.push({"exit": sys.exit, "quit": sys.exit}, interactive=False)
