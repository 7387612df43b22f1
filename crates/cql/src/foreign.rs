//! Keywords and functions of other systems, with help on what to write instead.

/// How to number rows without numbering them.
const FIRST_ROWS: &str = "the last row of each disk is in `IOstream [partition by VDisk rows 1]`, \
                          the greatest value of each is `max(x)` with `group by VDisk`, and the \
                          first rows of an order are `order by … limit 10`";

/// Finds the help for a word in a table, without regard to case.
fn find(table: &[(&[&str], &'static str)], word: &str) -> Option<&'static str> {
    let is = |words: &[&str]| words.iter().any(|other| other.eq_ignore_ascii_case(word));
    table.iter().find(|(words, _)| is(words)).map(|(_, help)| *help)
}

/// The help for a statement of another system.
pub(crate) fn statement(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["subscribe", "tail"], "write only the query: --deltas prints each change of it"),
            (&["show", "describe"], "docs/queries.md has the streams with their columns"),
            (
                &["insert", "emit"],
                "a query's results are its rows: write only the `select`; `create view NAME as \
                 select …` names it for other queries",
            ),
            (&["update", "delete", "merge"], "queries only read; a window removes old rows"),
            (&["drop", "alter"], "scripts keep no state: leave the declaration out"),
            (&["explain"], "`fathom explain` shows how a query is executed"),
            (&["set", "declare"], "`$name` in a query is a value given with --param name=value"),
        ],
        word,
    )
}

/// The help for an object that another system creates.
pub(crate) fn created(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["table", "source"], "an input is `create stream NAME (column type, …)`"),
            (
                &["materialized", "or"],
                "a view is always up to date: `create view NAME as select …`",
            ),
            (&["sink"], "results are printed; a query that the daemon keeps can act on them"),
        ],
        word,
    )
}

/// The help for a function of another system that makes windows or numbers rows. Such a function
/// cannot be parsed as one here.
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
                "a window follows the stream's name: `from IOstream [tumbling 5 seconds]`",
            ),
            (
                &["hop", "hopping", "hop_start", "hop_end", "hoppingwindow", "slidingwindow"],
                "a window follows the stream's name: `from IOstream [range 10 seconds slide \
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
            (&["row_number", "rank", "dense_rank", "ntile"], FIRST_ROWS),
        ],
        word,
    )
}

/// The help for a clause that follows an aggregate in another system.
pub(crate) fn after_call(word: &str) -> Option<&'static str> {
    find(
        &[
            (
                &["over"],
                "a window follows the stream's name: `from IOstream [rows 10]`, or \
                 `[partition by VDisk rows 10]` with `group by VDisk`",
            ),
            (&["filter"], "write `count(*) filter (where …)`"),
            (&["within"], "the second argument of `percentile(x, 99)` is the percentile"),
        ],
        word,
    )
}

/// The help for a clause that continues a query in another system.
pub(crate) fn continuation(word: &str) -> Option<&'static str> {
    find(
        &[
            (&["emit"], "leave it out: --deltas prints each change of the result"),
            (
                &["window"],
                "a window follows the stream's name, in square brackets: `IOstream [tumbling 5 \
                 seconds]`",
            ),
            (&["within"], "both sides of a join have windows: `IOstream [range 5 seconds] as a`"),
            (&["offset", "fetch"], "`limit 10` gives the first ten rows"),
            (&["qualify"], FIRST_ROWS),
        ],
        word,
    )
}

/// The help for a column that another system adds to the rows of a window.
pub(crate) fn column(word: &str) -> Option<&'static str> {
    find(
        &[(
            &["window_start", "window_end", "windowstart", "windowend", "rowtime"],
            "the time of a row is its column `BlktapTS`: `min(BlktapTS)` and `max(BlktapTS)` \
                 are the first and the last time in a window",
        )],
        word,
    )
}

/// The help for a function of another system.
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
            (&["log", "log2", "log10"], "write `ln(x)`; `ln(x) / ln(10)` is `log10(x)`"),
            (&["trunc", "truncate", "int"], "write `floor(x)`, or `cast(x as integer)`"),
            (
                &[
                    "now",
                    "current_timestamp",
                    "localtime",
                    "sysdate",
                    "unix_timestamp",
                    "mz_now",
                    "proctime",
                ],
                "the time of a row is its column `BlktapTS`, in nanoseconds; `[now]` is the window \
                 of the current instant",
            ),
            (&["mean", "average"], "write `avg(x)`"),
            (
                &["latest_by_offset", "earliest_by_offset", "arg_max", "arg_min", "max_by"],
                "the last row of each disk is in `IOstream [partition by VDisk rows 1]`",
            ),
            (&["countif", "count_if"], "write `count(*) filter (where …)`"),
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
