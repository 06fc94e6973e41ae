// What the tour says in German, see tour_en.js.

export const language = "de";
export const name = "Deutsch";
export const start = "Los";
export const back = "Zurück";
export const next = "Weiter";
export const close = "Tour beenden";
export const decline = "Nein, danke";
export const offer = "Neu hier? Sieben Schritte zeigen, wie dieses Modell ein Bild ansieht.";
export const left =
  "Hier geht es nun frei weiter: Sehen Sie sich um. Zurück und Weiter führen die Tour fort.";
export const noLens = "Vorhersagen der einzelnen Schichten wurden nicht aufgezeichnet.";

export const steps = [
  [
    "Patches",
    ({ rows, columns, best, probability }) =>
      `Das Modell zerlegt das Bild in ${rows} × ${columns} Patches, gezählt als (Zeile, Spalte) von (0, 0) an, und macht aus jedem ein Token, eine Liste von Zahlen. Daraus wird die Antwort: ${best}, ${probability}. Was geschieht dazwischen?`,
  ],
  [
    "Ein Patch sieht sich um",
    ({ patch, layer, head, share, other }) =>
      `Durch Attention sammelt jedes Token bei den anderen. In Schicht ${layer}, Head ${head} nimmt Patch (${patch}), umrandet, ${share} allein von Patch (${other}). Hell heißt mehr. Ein Klick auf andere Patches zeigt, wohin sie sehen.`,
  ],
  [
    "Heads sind verschieden",
    ({ sharp, layer, head, share }) =>
      `Jede Karte ist ein Head für denselben Patch. Schicht ${sharp.layer}, Head ${sharp.head} nahm ${sharp.share} von einem anderen Patch; Schicht ${layer}, Head ${head}, nun groß, höchstens ${share}. Unter jeder Karte steht die Entropie, 1 für gleichmäßige Attention.`,
  ],
  [
    "Schicht um Schicht",
    ({ patch, value }) =>
      `Jede Zeile ist eine Schicht und sammelt, was die Zeilen darüber gesammelt haben. Rollout multipliziert ihre Attention: Der Klassifikator liest am meisten von (${patch}), ${value}-mal so viel wie im Durchschnitt aller Patches.`,
  ],
  [
    "Die Entscheidung entsteht",
    ({ early, earlyProbability, last, best, probability }) =>
      `Nach Schicht 0 bedeuten die Tokens ${early}, ${earlyProbability}; nach Schicht ${last} ${best}, ${probability}. Jede farbige Karte zeigt, als welche Klasse die Patches gelesen werden.`,
  ],
  [
    "Verdecken, was zählt",
    ({ count, isTraced, best, before, after, now }) =>
      `Die ${count} wichtigsten Patches, ${isTraced ? "von der Antwort durch das ganze Modell zurückverfolgt" : "im Rollout der Attention"}, sind verdeckt, und das Modell hat neu geantwortet. ${best}: vorher ${before}, jetzt ${after}. Es sagt ${now}: Auch graue Quadrate sind eine Form. „Undo“ bringt sie zurück.`,
  ],
  [
    "Jetzt Sie",
    ({ count }) =>
      `Ziehen Sie ein Foto hierher, oder wählen Sie eines; es bleibt in dieser Seite. Das Modell kennt ${count} Klassen und hält es für eine davon. M schaltet einen angeklickten Head stumm, ein Pinsel (brush) verdeckt Patches.`,
  ],
];
