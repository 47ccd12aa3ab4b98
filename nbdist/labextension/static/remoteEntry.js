// An extension of JupyterLab and Notebook 7, for what a page can do while cells run. When
// it is loaded then, it asks the kernel what they have shown, shows it, and goes on with
// it. It loads the widgets, and passes on what the user does in the monitor.
//
// It is a container of webpack's module federation, in which JupyterLab loads
// extensions. It imports nothing, so it is not bundled. `nbdist/widgets/cell_outputs.py`
// and `nbdist/widgets/control_comms.py` are the kernel's side.

const REQUEST = "nbdist_outputs_request";
const OUTPUTS = "nbdist_outputs";
const PRESENCE_REQUEST = "nbdist_presence_request";
const PRESENCE = "nbdist_presence";
const WIDGET_STATES = "jupyter.widget.control"; // ipywidgets' comm for the states of all
const MONITOR = "nbdist.widgets.monitor.Monitor";

// The messages of a cell's execution, for the output area: what JupyterLab calls a
// future. The execution was requested by the page before this one.
class Replay {
  constructor(id, cell) {
    this.msg = { header: { msg_id: id, msg_type: "execute_request" }, content: {} };
    this.done = new Promise(() => {}); // a cell in the background may show more
    this.isDisposed = false;
    this.onIOPub = this.onReply = this.onStdin = () => {};
    this.cell = cell;
  }

  // Takes a message with which the kernel publishes output.
  take(msg) {
    if (msg.header.msg_type !== "status") {
      this.onIOPub(msg);
    } else if (msg.content.execution_state === "idle") {
      this.end();
    }
  }

  begin(count) {
    this.count = count;
    this.cell.model.executionState = "running";
    this.cell.setPrompt("*");
  }

  end() {
    if (this.count === undefined) return;
    this.cell.model.executionState = "idle";
    this.cell.model.executionCount = this.count;
    this.cell.setPrompt(String(this.count));
    this.count = undefined;
  }

  // JupyterLab calls this when the cell is run again.
  dispose() {
    this.isDisposed = true;
    this.count = undefined;
  }

  registerMessageHook() {}
  removeMessageHook() {}
  sendInputReply() {}
}

// Follows the cells of one notebook in one kernel.
class Follower {
  constructor(panel, kernel) {
    this.panel = panel;
    this.kernel = kernel;
    this.replays = new Map(); // by the id of the request that the earlier page has sent
    this.take = (_, msg) => this.onMessage(msg);
    kernel.iopubMessage.connect(this.take);
    kernel.sendControlMessage(message(kernel, REQUEST), false, true);
  }

  onMessage(msg) {
    const id = msg.parent_header.msg_id;
    if (msg.header.msg_type === OUTPUTS) {
      if (msg.content.session === this.kernel.clientId) this.restore(id, msg.content);
      return;
    }
    for (const [key, replay] of this.replays) {
      if (replay.isDisposed) this.replays.delete(key);
      // Another cell, or the monitor, may update a display.
      else if (key === id || msg.header.msg_type === "update_display_data") replay.take(msg);
    }
  }

  restore(id, { cell_id, execution_count, is_running, is_live, messages }) {
    const cell = this.panel.content.widgets.find((each) => each.model.id === cell_id);
    if (!cell?.outputArea || cell.outputArea.future) return; // it was run on this page
    // The saved notebook has the whole output of a cell that had ended before, unless its
    // displays are updated later.
    if (!is_running && !is_live && cell.model.executionCount !== null) return;
    const replay = new Replay(id, cell);
    cell.outputArea.future = replay; // which clears the outputs
    this.replays.set(id, replay);
    replay.begin(execution_count);
    for (const { msg_type, content } of messages) {
      replay.onIOPub({ header: { msg_type }, content, metadata: {}, parent_header: {} });
    }
    if (!is_running) replay.end();
  }

  dispose() {
    this.kernel.iopubMessage.disconnect(this.take);
  }
}

function message(kernel, type, content = {}, metadata = {}, buffers = []) {
  const header = {
    msg_id: crypto.randomUUID(),
    msg_type: type,
    session: kernel.clientId,
    username: kernel.username,
    date: new Date().toISOString(),
    version: "5.3",
  };
  return { channel: "control", header, parent_header: {}, metadata, content, buffers };
}

// Sends comms of one kernel on its control channel, which answers while a cell runs: those
// of monitors, and the request of a new page for the states of all widgets.
class ControlComms {
  // `usesNbdist()` tells whether the notebook of the kernel has nbdist's magics.
  constructor(kernel, usesNbdist) {
    this.kernel = kernel;
    this.usesNbdist = usesNbdist;
    this.comms = new Set();
    const sendShell = kernel.sendShellMessage.bind(kernel);
    kernel.sendShellMessage = (msg, ...options) => {
      if (!this.comms.has(msg.content?.comm_id)) return sendShell(msg, ...options);
      msg.channel = "control";
      delete msg.header.subshell_id;
      return kernel.sendControlMessage(msg, ...options);
    };
    const createComm = kernel.createComm.bind(kernel);
    kernel.createComm = (target, id) => {
      const comm = createComm(target, id);
      if (target === WIDGET_STATES && this.usesNbdist()) this.choose(comm);
      return comm;
    };
    kernel.anyMessage.connect((_, { msg, direction }) => {
      if (direction === "recv") this.look(msg);
    });
  }

  // Delays a comm's first messages until it is known whether the kernel has nbdist.
  choose(comm) {
    const known = this.isPresent().then((isPresent) => {
      if (isPresent) this.comms.add(comm.commId);
    });
    for (const method of ["open", "send", "close"]) {
      const now = comm[method].bind(comm);
      comm[method] = (...content) => {
        known.then(() => now(...content)).catch((error) => console.warn("nbdist:", error));
        return { msg: message(this.kernel, method) }; // stands for the message's future
      };
    }
  }

  // Whether the kernel has loaded nbdist. It says so before its status is idle again.
  isPresent() {
    const ask = message(this.kernel, PRESENCE_REQUEST);
    return new Promise((resolve) => {
      this.kernel.sendControlMessage(ask, false, true).onIOPub = ({ header, content }) => {
        if (header.msg_type === PRESENCE) resolve(true);
        else if (content.execution_state === "idle") resolve(false);
      };
    });
  }

  // Notes the comms of monitors.
  look({ header, content }) {
    if (header.msg_type === "comm_open") {
      this.note(content.comm_id, content.data?.state);
    } else if (header.msg_type === "comm_msg" && content.data?.method === "update_states") {
      for (const [id, { state }] of Object.entries(content.data.states)) this.note(id, state);
    }
  }

  note(id, state) {
    if (state?._anywidget_id === MONITOR) this.comms.add(id);
  }
}

function usesNbdist(panel) {
  const cells = panel.content.model?.sharedModel?.cells ?? [];
  return cells.some((cell) => cell.getSource().includes("nbdist"));
}

// Follows a notebook's kernel, and the one that replaces it.
async function follow(panel) {
  await panel.context.ready;
  await panel.sessionContext.ready;
  let follower;
  const change = (kernel) => {
    follower?.dispose();
    follower = kernel && usesNbdist(panel) ? new Follower(panel, kernel) : undefined;
  };
  change(panel.sessionContext.session?.kernel);
  panel.sessionContext.kernelChanged.connect((_, { newValue }) => change(newValue));
  panel.disposed.connect(() => change(null));
}

function notebooks(app) {
  return [...app.shell.widgets("main")].filter((panel) => panel.sessionContext && panel.context);
}

const outputs = {
  id: "nbdist:outputs",
  description: "Shows the output of cells of ranks again when a page is reloaded",
  autoStart: true,
  activate(app) {
    const followed = new WeakSet();
    const look = () => {
      for (const panel of notebooks(app)) {
        if (followed.has(panel)) continue;
        followed.add(panel);
        follow(panel).catch((error) => console.warn("nbdist:", error));
      }
    };
    app.restored.then(look);
    app.shell.layoutModified?.connect(look); // JupyterLab
    app.shell.currentChanged?.connect(look); // Notebook 7
  },
};

const comms = {
  id: "nbdist:comms",
  description: "Reaches the monitor's kernel while a cell runs",
  autoStart: true,
  activate(app) {
    const { kernels } = app.serviceManager;
    const connectTo = kernels.connectTo.bind(kernels);
    kernels.connectTo = (options) => {
      const kernel = connectTo(options);
      const mine = (panel) => panel.sessionContext.session?.kernel === kernel;
      new ControlComms(kernel, () => notebooks(app).filter(mine).some(usesNbdist));
      return kernel;
    };
  },
};

window._JUPYTERLAB ??= {};
window._JUPYTERLAB.nbdist = {
  init() {},
  async get() {
    return () => ({ __esModule: true, default: [outputs, comms], Follower, ControlComms });
  },
};
