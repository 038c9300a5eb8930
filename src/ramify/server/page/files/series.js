// The answer of /v1/activity as arrays for charts: a value for each bucket of the last ten minutes.

const LEAST = 24; // buckets: a server that has just begun is shown for two minutes

/** { times, read, shared, computed, ttft, worst, running, waiting }, oldest first. */
export function bucketSeries(history) {
  const { bucket_s: width, num_buckets: most } = history;
  const last = Math.floor(history.time / width);
  const first = Math.round((history.buckets[0]?.time ?? history.time) / width) - 1;
  const size = Math.min(most, Math.max(LEAST, last - first + 1));
  const byNumber = new Map(history.buckets.map((each) => [Math.round(each.time / width), each]));
  const numbers = Array.from({ length: size }, (_, index) => last - size + 1 + index);
  const column = (name, empty) => numbers.map((number) => byNumber.get(number)?.[name] ?? empty);
  return {
    times: numbers.map((number) => number * width),
    read: column("read", 0),
    shared: column("shared", 0),
    computed: column("computed", 0),
    ttft: column("ttft_s", null),
    worst: column("max_ttft_s", null),
    running: column("running", 0),
    waiting: column("waiting", 0),
  };
}

/** Hit rate of each bucket, and the ideal one as far as the operator's samples say. */
export function hitRates(history, series) {
  const hit = series.times.map((_, at) => {
    const saved = series.read[at] + series.shared[at];
    const total = saved + series.computed[at];
    return total ? saved / total : null;
  });
  const ideal = series.times.map(() => null);
  const samples = history.cache ?? [];
  for (let index = 1; index < samples.length; index += 1) {
    const [before, after] = [samples[index - 1], samples[index]];
    const lookups = after.lookup_tokens - before.lookup_tokens;
    if (lookups <= 0) continue;
    const rate = (after.ideal_hit_tokens - before.ideal_hit_tokens) / lookups;
    series.times.forEach((time, at) => {
      const isBetween = time + history.bucket_s > before.time && time < after.time;
      // Samples and buckets begin at different times; what was hit could be hit.
      if (isBetween && hit[at] !== null) ideal[at] = Math.max(rate, hit[at]);
    });
  }
  return { hit, ideal };
}

/** Sums over all buckets. */
export function totals(history) {
  const sum = { requests: 0, read: 0, shared: 0, computed: 0, output: 0, ttft: 0 };
  for (const bucket of history.buckets) {
    for (const name of ["requests", "read", "shared", "computed", "output"]) {
      sum[name] += bucket[name];
    }
    sum.ttft += (bucket.ttft_s ?? 0) * bucket.requests;
  }
  return sum;
}
