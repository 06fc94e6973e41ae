// Starts the Attention tab in a file that page.py has written.
//
// What TensorBoard's server would answer is in elements <script data-name>, compressed: the files of
// static/ by their names, and all other answers by "ROUTE?QUERY".

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

  /** Make the address of a file, after those of the modules that it imports. */
  async function link(name) {
    if (name in assets) return;
    let text = await answers[name]().text();
    for (const [statement, other] of text.matchAll(/\bfrom "\.\/([^"]+)"/g)) {
      await link(other);
      text = text.replace(statement, `from "${assets[other]}"`);
    }
    assets[name] = URL.createObjectURL(new Blob([text], elements.get(name).dataset));
  }

  for (const [name, { dataset }] of elements) if (dataset.type.startsWith("text/")) await link(name);
  globalThis.attentionFile = { answers, assets };
  const { render } = await import(assets["index.js"]);
  await render();
})().catch((error) => document.body.append(`This page needs a newer browser: ${error.message}`));
