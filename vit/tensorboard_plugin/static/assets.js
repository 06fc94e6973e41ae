// The files in static/, wherever they are.

/** Return the address of a file: on the server, or within a page that is one file. */
export function assetOf(name) {
  return globalThis.attentionFile?.assets[name] ?? new URL(name, import.meta.url).href;
}
