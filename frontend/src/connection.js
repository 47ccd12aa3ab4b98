// Feeds a model's messages to its store, acknowledges them, asks for what is missing.

const ACKNOWLEDGE_AFTER_MS = 500;

/** Returns the function that ends the connection. */
export function connect(model, store) {
  let timer = null;

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
  const receive = (content, buffers) => {
    if (content.kind !== "update") return;
    if (!store.apply(content, buffers[0])) tell({ kind: "everything" });
    else timer ??= setTimeout(acknowledge, ACKNOWLEDGE_AFTER_MS);
  };

  model.on("msg:custom", receive);
  hear(model)
    .catch((error) => console.debug("nbdist: anywidget passes the messages on", error))
    .then(() => tell({ kind: "everything" }));
  return () => {
    clearTimeout(timer);
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
