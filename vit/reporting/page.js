// Starts the Attention tab in a file that page.py has written. What TensorBoard's server would answer
// is in elements <script data-name>: static files by name, other answers by "ROUTE?QUERY".

(async () => {
  const answers = {}; // functions that return a Response, by name
  const assets = {}; // addresses of modules and styles, by name
  const elements = new Map();
  for (const element of document.querySelectorAll("script[data-name]")) {
    elements.set(element.dataset.name, element);
    answers[element.dataset.name] = () => unpack(element);
  }

  function unpack({ dataset, textContent }) {
    const bytes = Uint8Array.from(atob(textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream, { status: Number(dataset.status) });
  }

  /**
   * Make the address of a file, after those of the modules that it imports. What imports nothing is
   * in the address itself: Chromium lets no worker of a local page load a blob as a module.
   */
  async function link(name) {
    if (name in assets) return;
    const { type } = elements.get(name).dataset;
    let text = await answers[name]().text();
    const imports = [...text.matchAll(/\bfrom "\.\/([^"]+)"/g)];
    for (const [statement, other] of imports) {
      await link(other);
      text = text.replace(statement, `from "${assets[other]}"`);
    }
    assets[name] = imports.length
      ? URL.createObjectURL(new Blob([text], { type }))
      : `data:${type},${encodeURIComponent(text)}`;
  }

  for (const [name, { dataset }] of elements)
    if (dataset.type.startsWith("text/")) await link(name);
  globalThis.attentionFile = { answers, assets };
  await (await import(assets["index.js"])).render();
})().catch((error) => document.body.append(`This page needs a newer browser: ${error.message}`));
