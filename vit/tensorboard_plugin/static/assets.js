// Where the files of this folder are: beside this module, or within a page that is one file.

/** Return the address of a file in static/. */
export function assetOf(name) {
  return globalThis.attentionFile?.assets[name] ?? new URL(name, import.meta.url).href;
}
