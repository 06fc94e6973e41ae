// The entry of the Attention tab: TensorBoard loads this module into an iframe and calls render().

import { App } from "./app.js";
import { assetOf } from "./assets.js";
import { make } from "./dom.js";

export async function render() {
  document.documentElement.lang = "en";
  document.title ||= "Attention";
  const style = make("link", { rel: "stylesheet", href: assetOf("style.css") });
  const loaded = new Promise((done) => style.addEventListener("load", done));
  document.head.append(style);
  await loaded; // layouts are measured
  await new App(document.body).start();
}
