// Feeds a model's messages to its store, acknowledges them, asks for what is missing.

const ACKNOWLEDGE_AFTER_MS = 500;

/** Returns the function that ends the connection. */
export function connect(model, store) {
  let timer = null;

  const acknowledge = () => {
    timer = null;
    model.send({ kind: "acknowledge", sequence: store.sequence });
  };
  const receive = (content, buffers) => {
    if (content.kind !== "update") return;
    if (!store.apply(content, buffers[0])) model.send({ kind: "everything" });
    else timer ??= setTimeout(acknowledge, ACKNOWLEDGE_AFTER_MS);
  };

  model.on("msg:custom", receive);
  model.send({ kind: "everything" });
  return () => {
    clearTimeout(timer);
    model.off("msg:custom", receive);
  };
}
