//! Words of other systems, and what this language has instead.

/// Finds a word among some, whatever its case.
fn find(table: &[(&[&str], &'static str)], word: &str) -> Option<&'static str> {
    let is = |words: &[&str]| words.iter().any(|other| other.eq_ignore_ascii_case(word));
    table.iter().find(|(words, _)| is(words)).map(|(_, help)| *help)
}

/// What stands for a statement of another system.
pub(crate) fn statement(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["with"], "give the query a name before its use: `create view NAME as select …;`"),
            (
                &["insert", "emit"],
                "a query's results are its rows: write the `select` alone; `create view NAME as \
                 select …` names it for others",
            ),
            (
                &["update", "delete", "merge"],
                "queries only read; what is over leaves with a window",
            ),
            (&["drop", "alter"], "a script begins with nothing: leave out what is not wanted"),
            (&["explain"], "`fathom explain` shows how a query is carried out"),
            (&["set", "declare"], "`$name` in a query is a value given with --param name=value"),
        ],
        word,
    )
}

/// What stands for something that another system creates.
pub(crate) fn created(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["table", "source"], "an input is `create stream NAME (column type, …)`"),
            (
                &["materialized", "or"],
                "a view is always up to date: `create view NAME as select …`",
            ),
            (&["sink"], "results are printed, or acted on by a query that the daemon keeps"),
        ],
        word,
    )
}

/// What stands for a function of another system that makes windows or numbers rows: it cannot be
/// read as a function here.
pub(crate) fn window_function(word: &str) -> Option<&'static str> {
    find(
        &[
            (
                &[
                    "tumble",
                    "tumbling",
                    "tumble_start",
                    "tumble_end",
                    "tumblingwindow",
                    "time_bucket",
                    "date_trunc",
                    "date_bin",
                    "time_slice",
                ],
                "a window stands behind the stream's name: `from IOstream [tumbling 5 seconds]`",
            ),
            (
                &["hop", "hopping", "hop_start", "hop_end", "hoppingwindow", "slidingwindow"],
                "a window stands behind the stream's name: `from IOstream [range 10 seconds slide \
                 5 seconds]`",
            ),
            (
                &["session", "sessionwindow", "session_start", "session_end", "cumulate"],
                "windows are by time or by rows: `[range 10 seconds]`, `[tumbling 5 seconds]`, \
                 `[rows 100]`",
            ),
            (
                &["lag", "lead", "first_value", "last_value", "nth_value"],
                "the last rows of each disk are in `IOstream [partition by VDisk rows 2]`: join it \
                 with `IOstream [now]`",
            ),
            (
                &["row_number", "rank", "dense_rank", "ntile"],
                "the first rows of an order are `order by … limit 10`",
            ),
        ],
        word,
    )
}

/// What stands for what follows an aggregate in another system.
pub(crate) fn behind_call(word: &str) -> Option<&'static str> {
    find(
        &[
            (
                &["over"],
                "a window stands behind the stream's name: `from IOstream [rows 10]`, or \
                 `[partition by VDisk rows 10]` with `group by VDisk`",
            ),
            (&["filter"], "count what meets a condition with `sum(case when … then 1 else 0 end)`"),
            (&["within"], "`percentile(x, 99)` takes which percentile as its second argument"),
        ],
        word,
    )
}

/// What stands for what goes on with a query in another system.
pub(crate) fn continuation(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["emit"], "leave it out: each change of the result is one with --deltas"),
            (
                &["window"],
                "a window stands in brackets behind the stream's name: `IOstream [tumbling 5 \
                 seconds]`",
            ),
            (&["within"], "both sides of a join have windows: `IOstream [range 5 seconds] as a`"),
            (&["offset", "fetch"], "`limit 10` gives the first ten rows"),
            (&["qualify"], "the first rows of an order are `order by … limit 10`"),
        ],
        word,
    )
}

/// What stands for a function of another system.
pub(crate) fn function(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["substr", "mid"], "write `substring(x, from, length)`"),
            (&["len", "char_length", "octet_length"], "write `length(x)`"),
            (&["nvl", "ifnull", "isnull"], "write `coalesce(x, …)`"),
            (&["if", "iif", "decode"], "write `case when … then … else … end`"),
            (&["concat"], "write `a || b`"),
            (&["instr", "strpos", "charindex", "contains"], "write `position(part, x)`"),
            (&["mod"], "write `a % b`"),
            (&["pow"], "write `power(x, y)`"),
            (&["log", "log2", "log10"], "write `ln(x)`, which divided by `ln(10)` is `log10(x)`"),
            (&["trunc", "truncate", "int"], "write `floor(x)`, or `cast(x as integer)`"),
            (
                &["now", "current_timestamp", "localtime", "sysdate", "unix_timestamp"],
                "the time of a row is its column `BlktapTS`, in nanoseconds; `[now]` is the window \
                 of what has just come",
            ),
            (&["mean", "average"], "write `avg(x)`"),
            (&["std", "stdev", "stddev_pop", "stddev_samp"], "write `stddev(x)`"),
            (&["var_pop", "var_samp"], "write `variance(x)`"),
            (
                &[
                    "percentile_cont",
                    "percentile_disc",
                    "quantile",
                    "approx_percentile",
                    "approx_quantile",
                ],
                "write `percentile(x, 99)`, which is exact",
            ),
            (&["count_distinct", "distinct_count"], "write `count(distinct x)`"),
            (
                &["approx_distinct", "approx_count", "hll", "uniq"],
                "write `approx_count_distinct(x)`",
            ),
            (&["mode", "topk", "approx_top_k"], "write `top_k(x, 1)`"),
            (
                &["listagg", "string_agg", "group_concat", "array_agg", "collect"],
                "`top_k(x, 100)` gives the values of a group as a text",
            ),
            (&["first", "last", "any_value"], "write `min(x)` or `max(x)`"),
            (&["to_char", "str"], "write `cast(x as text)`"),
            (&["try_cast", "convert"], "write `cast(x as integer)`, which never fails"),
        ],
        word,
    )
}
