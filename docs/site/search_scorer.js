/* What a search finds first: pages for users, then those that tell of the past. */
var Scorer = {
  score: (result) => result[4] - (/(adr\/|CHANGELOG|CONTRIBUTING|RESULTS)/.test(result[0]) ? 12 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
