// The overview: state of the run, findings, where every group is, and the charts.
import { fill, h } from "./element.js";

export function show(container, parameters, context) {
  const title = h("h1", null, context.run.name);
  fill(container, title);
  return { update() {}, close() {} };
}
