/* What a search finds first: pages for users, then those that tell of the past; and a page whose title has a word of the question. */
var asked = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\s+/).filter((word) => word.length > 2);
var Scorer = {
  score: (result) =>
    result[4] +
    5 * asked.filter((word) => result[1].toLowerCase().includes(word)).length -
    (/(adr\/|CHANGELOG|CONTRIBUTING|RESULTS)/.test(result[0]) ? 12 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
