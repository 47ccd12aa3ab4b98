// Feeds a model's messages to its store, acknowledges them, asks for what is missing.

const ACKNOWLEDGE_AFTER_MS = 500;
const ASK_AGAIN_AFTER_MS = 2000;

/** Returns the function that ends the connection. */
export function connect(model, store) {
  let timer = null;
  let asking = null;
  let ended = false;

  const tell = (message) => {
    try {
      model.send(message);
    } catch (error) {
      console.debug("nbdist: the kernel has gone", error);
    }
  };
  const acknowledge = () => {
    timer = null;
    tell({ kind: "acknowledge", sequence: store.sequence });
  };
  // Asks until everything comes, ever more rarely: a busy kernel does not answer.
  const ask = (again = ASK_AGAIN_AFTER_MS) => {
    if (ended) return;
    clearTimeout(asking);
    asking = setTimeout(() => ask(2 * again), again);
    tell({ kind: "everything" });
  };
  const receive = (content, buffers) => {
    if (content.kind !== "update") return;
    if (!store.apply(content, buffers[0])) {
      if (asking === null) ask();
      return;
    }
    if (content.full) {
      clearTimeout(asking);
      asking = null;
    }
    timer ??= setTimeout(acknowledge, ACKNOWLEDGE_AFTER_MS);
  };

  model.on("msg:custom", receive);
  hear(model)
    .catch((error) => console.debug("nbdist: anywidget passes the messages on", error))
    .then(() => ask());
  return () => {
    ended = true;
    clearTimeout(timer);
    clearTimeout(asking);
    model.off("msg:custom", receive);
  };
}

/**
 * Takes the messages from the comm of a model. anywidget passes them on when the model is
 * initialised, but drops all of them for ever if that takes longer than 2 s, as it does while
 * the page or the machine is busy.
 */
async function hear(model) {
  const whole = await model.widget_manager.get_model(model.get("picture"));
  const { _handle_comm_msg: handle } = Object.getPrototypeOf(whole.constructor.prototype);
  whole.comm.on_msg(handle.bind(whole));
}
