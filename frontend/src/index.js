// The anywidget module. Each model gets a store; each of its views draws from it.
import { connect } from "./connection.js";
import { Store } from "./store.js";
import { View } from "./view.js";

export default () => {
  const store = new Store();
  return {
    initialize({ model }) {
      return connect(model, store);
    },
    render({ model, el }) {
      const view = new View(el, model, store);
      return () => view.destroy();
    },
  };
};
