// TensorBoard around the iframe: the address of the page, which keeps the state, and the theme.
//
// TensorBoard keeps its tab and the parameters of plugins in the fragment:
// #attention&p.attention.KEY=VALUE. It rewrites the query string, but leaves these parameters alone.

const TAB = "attention";
const PREFIX = "p.attention.";

const host = findHost();

/** TensorBoard's window, or this one where the tab is one file, alone or from another origin. */
function findHost() {
  if (globalThis.attentionFile) return window;
  try {
    return typeof window.parent.location.hash === "string" ? window.parent : window;
  } catch {
    return window;
  }
}

function parts(hash = host.location.hash) {
  return hash
    .slice(1)
    .split("&")
    .filter((part) => part !== "");
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return ""; // cut off in the middle of a character
  }
}

/** Read the parameters of this tab from the address, or from the end of another one. */
export function readAddress(hash) {
  const found = {};
  for (const part of parts(hash)) {
    const [key, value] = part.split("=", 2).map(decode);
    if (key.startsWith(PREFIX) && value !== undefined) found[key.slice(PREFIX.length)] = value;
  }
  return found;
}

/** Return the address of this page with the given parameters. */
export function addressOf(parameters) {
  const others = parts().filter((part) => part.includes("=") && !decode(part).startsWith(PREFIX));
  const own = Object.entries(parameters).map(
    ([key, value]) => `${PREFIX}${key}=${encodeURIComponent(value)}`,
  );
  const address = new URL(host.location.href);
  address.hash = [TAB, ...others, ...own].join("&");
  return address.href;
}

/** Put the parameters into the address, without a new entry in the history. */
export function writeAddress(parameters) {
  const elsewhere = host !== window && parts()[0] !== TAB; // another tab is open
  if (elsewhere) return;
  host.history.replaceState(host.history.state, "", addressOf(parameters));
}

/** Let keys reach this tab, as after opening a link, unless the focus is somewhere already. */
export function takeFocus() {
  const { activeElement, body } = host.document;
  if (host !== window && (activeElement === null || activeElement === body)) window.focus();
}

/** Call a function with the parameters when somebody changes the address, as by pasting a link. */
export function watchAddress(changed) {
  host.addEventListener("hashchange", ({ newURL }) => {
    const { hash } = new URL(newURL); // meanwhile, the address may have been written again
    const parameters = readAddress(hash);
    if (parts(hash)[0] === TAB && Object.keys(parameters).length > 0) changed(parameters);
  });
}

/** Follow TensorBoard's theme, or the system's without TensorBoard; call a function on changes. */
export function watchTheme(changed) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const dark =
      host === window ? system.matches : host.document.body.classList.contains("dark-mode");
    const theme = dark ? "dark" : "light";
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    changed();
  };
  if (host === window) system.addEventListener("change", apply);
  else new MutationObserver(apply).observe(host.document.body, { attributeFilter: ["class"] });
  apply();
}
