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
  tell({ kind: "everything" });
  return () => {
    clearTimeout(timer);
    model.off("msg:custom", receive);
  };
}
