"""The names of the endpoints: the functions that the notebook calls on a rank.

An endpoint is "module:function", with a module of `nbdist.engine`. A request has this
name, and `engine/rpc_server.py` calls the function. The notebook does not import the
functions, because their modules import torch and MPI.
"""

__all__ = [
    "ABORT_NCCL",
    "ADOPT_VARIABLES",
    "CALL",
    "CANCEL_CHANGE",
    "CHANGE",
    "COMMS",
    "COMPARE",
    "COMPLETE",
    "DESCRIBE",
    "ELASTIC_BEGIN_FROM",
    "ELASTIC_DECIDE",
    "ELASTIC_DEFER",
    "ELASTIC_EXPECT",
    "ELASTIC_ORDER",
    "ELASTIC_VARIABLES",
    "ELASTIC_WANT_RESIZE",
    "ELASTIC_WANT_SAVE",
    "END",
    "EXPORT_VARIABLES",
    "FETCH",
    "GREET",
    "HOLD_TIMEOUTS",
    "INPUT_REPLY",
    "INTERRUPT",
    "IN_FLIGHT",
    "LEAVES",
    "LOOK",
    "MEMORY",
    "MEMORY_REPORT",
    "NCCL_CALLS",
    "NCCL_TRACE",
    "POST_MORTEM",
    "PROFILE_COLLECT",
    "PROFILE_ORDER",
    "PROGRESS",
    "RELEASE",
    "RELEASE_FROM",
    "RELEASE_FROM_NCCL",
    "RENEW",
    "RUN_CELL",
    "RUN_SCRIPT",
    "SHOW",
    "STACK",
    "STATUS",
    "STORE",
    "VARIABLES",
    "WAITING",
    "WHERE",
]

ADOPT_VARIABLES = "nbdist.engine.calls:adopt_variables"
CALL = "nbdist.engine.calls:call"
COMPARE = "nbdist.engine.calls:compare"
EXPORT_VARIABLES = "nbdist.engine.calls:export_variables"
FETCH = "nbdist.engine.calls:fetch"
GREET = "nbdist.engine.calls:greet"
SHOW = "nbdist.engine.calls:show"
STORE = "nbdist.engine.calls:store"

RUN_CELL = "nbdist.engine.cells:run_cell"

COMMS = "nbdist.engine.comms:receive"

ABORT_NCCL = "nbdist.engine.control_handlers:abort_nccl"
COMPLETE = "nbdist.engine.control_handlers:complete"
DESCRIBE = "nbdist.engine.control_handlers:describe"
END = "nbdist.engine.control_handlers:end"
HOLD_TIMEOUTS = "nbdist.engine.control_handlers:hold_timeouts"
INTERRUPT = "nbdist.engine.control_handlers:interrupt"
MEMORY = "nbdist.engine.control_handlers:memory"
RELEASE = "nbdist.engine.control_handlers:release"
RELEASE_FROM = "nbdist.engine.control_handlers:release_from"
RELEASE_FROM_NCCL = "nbdist.engine.control_handlers:release_from_nccl"
STACK = "nbdist.engine.control_handlers:stack"
PROGRESS = "nbdist.engine.control_handlers:progress"
STATUS = "nbdist.engine.control_handlers:status"
WAITING = "nbdist.engine.control_handlers:waiting"
WHERE = "nbdist.engine.control_handlers:where"

POST_MORTEM = "nbdist.engine.debugger:post_mortem"

ELASTIC_BEGIN_FROM = "nbdist.engine.elastic:begin_from"
ELASTIC_DECIDE = "nbdist.engine.elastic:decide"
ELASTIC_EXPECT = "nbdist.engine.elastic:expect"
ELASTIC_DEFER = "nbdist.engine.elastic:defer"
ELASTIC_ORDER = "nbdist.engine.elastic:order"
ELASTIC_VARIABLES = "nbdist.engine.elastic:variables"
ELASTIC_WANT_RESIZE = "nbdist.engine.elastic:want_resize"
ELASTIC_WANT_SAVE = "nbdist.engine.elastic:want_save"

IN_FLIGHT = "nbdist.engine.in_flight:in_flight"

LEAVES = "nbdist.engine.inspection:leaves"
LOOK = "nbdist.engine.inspection:look"
MEMORY_REPORT = "nbdist.engine.inspection:memory_report"
VARIABLES = "nbdist.engine.inspection:variables"

CANCEL_CHANGE = "nbdist.engine.membership:cancel"
CHANGE = "nbdist.engine.membership:change"

PROFILE_COLLECT = "nbdist.engine.profiler:collect"
PROFILE_ORDER = "nbdist.engine.profiler:order"

RUN_SCRIPT = "nbdist.engine.run_script:run_script"

INPUT_REPLY = "nbdist.engine.standard_input:reply"

NCCL_CALLS = "nbdist.engine.torch_group:nccl_calls"
NCCL_TRACE = "nbdist.engine.torch_group:nccl_trace"

RENEW = "nbdist.engine.world:renew"
