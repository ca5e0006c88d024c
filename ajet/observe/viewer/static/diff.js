// What two sequences have in common, and the words in which two texts differ.

const MOST_CELLS = 4_000_000;
/** A table of more cells than this would stop the page; then what lies between the common start and end counts as different. */

/** `[[i, j] …]`: pairs of equal items of two lists, in order, as many as possible. */
export function common(a, b, same = (x, y) => x === y) {
  let start = 0, end = 0;
  while (start < a.length && start < b.length && same(a[start], b[start])) start += 1;
  while (end < a.length - start && end < b.length - start && same(a[a.length - 1 - end], b[b.length - 1 - end])) end += 1;
  const pairs = Array.from({ length: start }, (_, index) => [index, index]);
  const rows = a.length - start - end, columns = b.length - start - end;
  if (rows && columns && rows * columns <= MOST_CELLS) {
    const best = Array.from({ length: rows + 1 }, () => new Uint32Array(columns + 1));
    for (let i = rows - 1; i >= 0; i--) for (let j = columns - 1; j >= 0; j--) best[i][j] = same(a[start + i], b[start + j]) ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    for (let i = 0, j = 0; i < rows && j < columns;) {
      if (same(a[start + i], b[start + j])) { pairs.push([start + i, start + j]); i += 1; j += 1; }
      else if (best[i + 1][j] >= best[i][j + 1]) i += 1;
      else j += 1;
    }
  }
  for (let index = end; index > 0; index--) pairs.push([a.length - index, b.length - index]);
  return pairs;
}

/** `[[i, j, same] …]` over both lists whole: what is equal side by side, the rest paired in order; -1 where one has no more. */
export function aligned(a, b, same) {
  const rows = [];
  let i = 0, j = 0;
  for (const [x, y] of [...common(a, b, same), [a.length, b.length]]) {
    for (; i < x || j < y;) rows.push([i < x ? i++ : -1, j < y ? j++ : -1, false]);
    if (x < a.length && y < b.length) { rows.push([x, y, true]); i = x + 1; j = y + 1; }
  }
  return rows;
}

const LITTLE = 0.2;
const WORDS = /\p{L}+|\p{N}+|\s+|[^\p{L}\p{N}\s]/gu;

/** Each text as `[[piece, same] …]`, neighbouring pieces of one kind joined. */
export function wordDifferences(left, right) {
  const a = left.match(WORDS) || [], b = right.match(WORDS) || [];
  const pairs = common(a, b);
  const shared = pairs.reduce((sum, [index]) => sum + a[index].trim().length, 0);
  // a few signs in common say nothing: then they would only be noise
  if (shared < LITTLE * Math.min(left.length, right.length)) pairs.length = 0;
  return [pieces(a, new Set(pairs.map(([index]) => index))), pieces(b, new Set(pairs.map(([, index]) => index)))];
}

/** One text that became another, as `[[piece, "same" | "gone" | "fresh"] …]`. */
export function unified(before, after) {
  const [gone, fresh] = wordDifferences(before, after);
  const found = [];
  let i = 0, j = 0;
  while (i < gone.length || j < fresh.length) {
    if (i < gone.length && !gone[i][1]) found.push([gone[i++][0], "gone"]);
    else if (j < fresh.length && !fresh[j][1]) found.push([fresh[j++][0], "fresh"]);
    else {
      // the same words on both sides, but cut in other places
      const [left, right] = [gone[i][0], fresh[j][0]], length = Math.min(left.length, right.length);
      found.push([left.slice(0, length), "same"]);
      gone[i] = [left.slice(length), true];
      fresh[j] = [right.slice(length), true];
      if (!gone[i][0]) i += 1;
      if (!fresh[j][0]) j += 1;
    }
  }
  return found;
}

function pieces(words, kept) {
  const found = [];
  words.forEach((word, index) => {
    const same = kept.has(index);
    if (found.length && found.at(-1)[1] === same) found.at(-1)[0] += word;
    else found.push([word, same]);
  });
  return found;
}
