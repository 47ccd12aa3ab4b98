import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { connect } from "../src/connection.js";
import { Store } from "../src/store.js";
import { rows, update } from "./messages.js";

class Model {
  sent = [];
  listeners = new Set();
  widget_manager = { get_model: async () => { throw new Error("no such model"); } };
  get() { return "id"; }
  on(_, listener) { this.listeners.add(listener); }
  off(_, listener) { this.listeners.delete(listener); }
  send(message) { this.sent.push(message); }
  receive([message, buffer]) { for (const listener of this.listeners) listener(message, [buffer]); }
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

test("it asks, acknowledges together what comes together, and asks again at a gap", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const model = new Model();
  const end = connect(model, new Store());
  await settled();
  assert.deepEqual(model.sent, [{ kind: "everything" }]);

  model.receive(update(0, [["loss", 0, 1, 0, rows([1])]]));
  model.receive(update(1, []));
  assert.equal(model.sent.length, 1);
  mock.timers.tick(500);
  assert.deepEqual(model.sent[1], { kind: "acknowledge", sequence: 1 });

  model.receive(update(3, []));
  model.receive(update(4, []));
  assert.deepEqual(model.sent.slice(2), [{ kind: "everything" }]);

  end();
  assert.equal(model.listeners.size, 0);
  mock.timers.reset();
});

test("it asks until everything comes, ever more rarely", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const model = new Model();
  const end = connect(model, new Store());
  await settled();
  const asked = () => model.sent.filter(({ kind }) => kind === "everything").length;
  model.receive(update(7, [])); // which no store can use yet
  mock.timers.tick(1999);
  assert.equal(asked(), 1);
  mock.timers.tick(1);
  assert.equal(asked(), 2);
  mock.timers.tick(3999);
  assert.equal(asked(), 2);
  mock.timers.tick(1);
  assert.equal(asked(), 3);
  model.receive(update(8, [], { full: true }));
  mock.timers.tick(1_000_000);
  assert.equal(asked(), 3);

  model.receive(update(10, []));
  end();
  mock.timers.tick(1_000_000);
  assert.equal(asked(), 4);
  mock.timers.reset();
});

test("it does not ask after the end", async () => {
  const model = new Model();
  connect(model, new Store())();
  await settled();
  assert.deepEqual(model.sent, []);
});

test("it takes the messages of a model with which anywidget has lost patience", async () => {
  class WidgetModel {
    comm = { on_msg: (handler) => { this.handler = handler; } };
    _handle_comm_msg({ content }) { model.receive(content); }
  }
  class AnyModel extends WidgetModel {
    _handle_comm_msg() { throw new Error("Failed to initialize model."); }
  }
  const [model, whole, store] = [new Model(), new AnyModel(), new Store()];
  model.widget_manager = { get_model: async (id) => (assert.equal(id, "id"), whole) };
  const end = connect(model, store);
  await settled();
  assert.deepEqual(model.sent, [{ kind: "everything" }]);
  whole.handler({ content: update(0, [["loss", 0, 1, 0, rows([1])]]) });
  assert.deepEqual([...store.metrics.keys()], ["loss"]);
  end();
});

test("nothing is acknowledged after the end", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const model = new Model();
  const end = connect(model, new Store());
  await settled();
  model.receive(update(0, []));
  end();
  mock.timers.tick(1000);
  assert.equal(model.sent.length, 1);
  mock.timers.reset();
});

test("a kernel that has gone is no error", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const model = new Model();
  connect(model, new Store());
  await settled();
  model.receive(update(0, []));
  model.send = () => { throw new Error("Cannot send"); };
  mock.timers.tick(500);
  model.receive(update(2, []));
  mock.timers.reset();
});
