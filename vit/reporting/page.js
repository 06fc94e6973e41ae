// Starts the Attention tab in a file that page.py has written.
//
// What TensorBoard's server would answer is in elements <script data-name>, compressed: the files of
// static/ by their names, and all other answers by "ROUTE?QUERY".

(async () => {
  const assets = {}; // addresses of files by name, for assets.js
  const answers = {}; // functions that return a Response, by what the tab asks; for api.js
  const linking = new Map();

  const stored = [...document.querySelectorAll("script[data-name]")];
  const files = new Map(stored.map((element) => [element.dataset.name, element]));

  function unpack({ dataset, textContent }) {
    const bytes = Uint8Array.from(atob(textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream, { status: Number(dataset.status) });
  }

  /** Return the address of a file; a module's imports become the addresses of what it imports. */
  async function link(name) {
    const { type } = files.get(name).dataset;
    if (type !== "text/javascript") return address([await unpack(files.get(name)).blob()], type);
    let text = await unpack(files.get(name)).text();
    for (const [whole, other] of text.matchAll(/\bfrom "\.\/([^"]+)"/g)) {
      text = text.replace(whole, `from "${await linked(other)}"`);
    }
    return address([text], type);
  }

  const address = (parts, type) => URL.createObjectURL(new Blob(parts, { type }));
  const linked = (name) => linking.get(name) ?? linking.set(name, link(name)).get(name);

  for (const [name, element] of files) {
    if (name.includes("?")) answers[name] = () => unpack(element);
    else assets[name] = await linked(name);
  }
  globalThis.attentionFile = { assets, answers };
  await (await import(assets["index.js"])).render();
})().catch((error) => document.body.append(`This page needs a newer browser: ${error.message}`));
