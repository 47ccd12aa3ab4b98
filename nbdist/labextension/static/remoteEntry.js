// An extension of JupyterLab and Notebook 7. When a page is loaded while cells run, it
// asks the kernel what they have shown, shows it, and goes on with it.
//
// It is a container of webpack's module federation, in which JupyterLab loads
// extensions. It imports nothing, so it is not bundled. `nbdist/widgets/cell_outputs.py`
// is the kernel's side.

const REQUEST = "nbdist_outputs_request";
const OUTPUTS = "nbdist_outputs";

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
    kernel.sendControlMessage(request(kernel), false, true);
  }

  onMessage(msg) {
    const id = msg.parent_header.msg_id;
    if (msg.header.msg_type === OUTPUTS) {
      if (msg.content.session === this.kernel.clientId) this.restore(id, msg.content);
      return;
    }
    const replay = this.replays.get(id);
    if (replay?.isDisposed) this.replays.delete(id);
    else replay?.take(msg);
  }

  restore(id, { cell_id, execution_count, is_running, messages }) {
    const cell = this.panel.content.widgets.find((each) => each.model.id === cell_id);
    if (!cell?.outputArea || cell.outputArea.future) return; // it was run on this page
    // The saved notebook has the whole output of a cell that had ended before.
    if (!is_running && cell.model.executionCount !== null) return;
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

function request(kernel) {
  const header = {
    msg_id: crypto.randomUUID(),
    msg_type: REQUEST,
    session: kernel.clientId,
    username: kernel.username,
    date: new Date().toISOString(),
    version: "5.3",
  };
  return { channel: "control", header, parent_header: {}, metadata: {}, content: {},
    buffers: [] };
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

const plugin = {
  id: "nbdist:outputs",
  description: "Shows the output of cells of ranks again when a page is reloaded",
  autoStart: true,
  activate(app) {
    const followed = new WeakSet();
    const look = () => {
      for (const panel of app.shell.widgets("main")) {
        if (followed.has(panel) || !panel.sessionContext || !panel.context) continue;
        followed.add(panel);
        follow(panel).catch((error) => console.warn("nbdist:", error));
      }
    };
    app.restored.then(look);
    app.shell.layoutModified?.connect(look); // JupyterLab
    app.shell.currentChanged?.connect(look); // Notebook 7
  },
};

window._JUPYTERLAB ??= {};
window._JUPYTERLAB.nbdist = {
  init() {},
  async get() {
    return () => ({ __esModule: true, default: plugin, Follower });
  },
};
