// Where the files of this folder are: beside this module, or in a page that holds them all.

/** Tell whether this is a page that holds them all. */
export const isFile = () => globalThis.attentionFile !== undefined;

/** Return the address of a module or a style sheet in static/. */
export function assetOf(name) {
  return globalThis.attentionFile?.assets[name] ?? new URL(name, import.meta.url).href;
}

/**
 * Return a Response with a file in static/ or an answer of the server.
 *
 * A page that holds them all may not fetch anything.
 */
export async function fetchAsset(name) {
  return globalThis.attentionFile?.answers[name]() ?? fetch(assetOf(name));
}
