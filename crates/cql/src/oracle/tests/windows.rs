//! Windows and streams.

use super::*;

#[test]
fn a_range_is_open_at_its_start() {
    let inputs = numbers(&[(1, 7), (2, 8), (2, 8)]);
    let expected: &[(i64, i64, &[i64])] =
        &[(1, 1, &[7]), (2, 2, &[8]), (4, -1, &[7]), (5, -2, &[8])];
    check(window(range(3)), &inputs, expected);
}

#[test]
fn now_is_one_nanosecond() {
    let inputs = numbers(&[(1, 7), (2, 7), (5, 8)]);
    // At 2 one 7 leaves and another arrives: no change.
    check(window(range(1)), &inputs, &[(1, 1, &[7]), (3, -1, &[7]), (5, 1, &[8]), (6, -1, &[8])]);
}

#[test]
fn a_sliding_window_moves_at_multiples() {
    let slide = |length_ns, slide_ns| window(Window::Range { length_ns, slide_ns: Some(slide_ns) });
    let inputs = numbers(&[(0, 1), (3, 2), (10, 3), (11, 4)]);
    // At 10: (5, 10]; at 20: (15, 20].
    check(slide(5, 10), &inputs, &[(0, 1, &[1]), (10, -1, &[1]), (10, 1, &[3]), (20, -1, &[3])]);
    // A tumbling window: (0, 10], (10, 20].
    check(
        slide(10, 10),
        &numbers(&[(1, 1), (10, 2), (11, 3)]),
        &[
            (10, 1, &[1]),
            (10, 1, &[2]),
            (20, -1, &[1]),
            (20, -1, &[2]),
            (20, 1, &[3]),
            (30, -1, &[3]),
        ],
    );
    // Longer than its slide: (-10, 0], (-7, 3], and so on.
    check(slide(10, 3), &numbers(&[(1, 1)]), &[(3, 1, &[1]), (12, -1, &[1])]);
    // Before 0.
    check(
        slide(4, 4),
        &numbers(&[(-5, 1), (-4, 2)]),
        &[(-4, 1, &[1]), (-4, 1, &[2]), (0, -1, &[1]), (0, -1, &[2])],
    );
}

#[test]
fn rows_by_arrival() {
    // All rows of an instant arrive before the window is evaluated: 1 is never in it.
    let inputs = numbers(&[(1, 1), (1, 3), (1, 2), (4, 2), (5, 9)]);
    check(
        window(rows(2)),
        &inputs,
        &[(1, 1, &[2]), (1, 1, &[3]), (4, 1, &[2]), (4, -1, &[3]), (5, -1, &[2]), (5, 1, &[9])],
    );
    check(window(rows(0)), &inputs, &[]);
    // Rows arrive in the order of the slice, sorted by time.
    check(
        window(rows(1)),
        &numbers(&[(2, 5), (1, 3), (2, 4)]),
        &[(1, 1, &[3]), (2, -1, &[3]), (2, 1, &[4])],
    );
}

#[test]
fn rows_of_each_part() {
    let inputs = [
        input(0, 1, &[1, 10]),
        input(0, 1, &[2, 20]),
        input(0, 2, &[1, 11]),
        input(0, 3, &[NULL, 30]),
        input(0, 4, &[NULL, 31]),
    ];
    check(
        window(Window::Rows { by: vec![0], rows: 1 }),
        &inputs,
        &[
            (1, 1, &[1, 10]),
            (1, 1, &[2, 20]),
            (2, -1, &[1, 10]),
            (2, 1, &[1, 11]),
            (3, 1, &[NULL, 30]),
            (4, -1, &[NULL, 30]),
            (4, 1, &[NULL, 31]),
        ],
    );
}

#[test]
fn unbounded_keeps_all() {
    let inputs = numbers(&[(1, 1), (50, 1), (100, 2), (101, 3)]);
    check(window(Window::Unbounded), &inputs, &[(1, 1, &[1]), (50, 1, &[1]), (100, 1, &[2])]);
}

#[test]
fn a_window_of_the_greatest_length_never_ends() {
    let inputs = numbers(&[(1, 1)]);
    check(window(range(u64::MAX)), &inputs, &[(1, 1, &[1])]);
    let slide = Window::Range { length_ns: u64::MAX, slide_ns: Some(u64::MAX) };
    check(window(slide), &inputs, &[]);
}

#[test]
fn a_source_is_a_stream() {
    let inputs = [input(0, 2, &[5]), input(1, 1, &[6]), input(0, 2, &[5]), input(0, 1, &[9])];
    check_stream(Stream::Source(0), &inputs, &[(1, 1, &[9]), (2, 2, &[5])]);
}

#[test]
fn streams_of_insertions_and_deletions() {
    let inputs = numbers(&[(1, 1), (1, 1), (2, 2), (2, 1)]);
    let relation = || Relation::Set {
        operation: crate::ast::SetOperation::Union,
        all: true,
        left: Box::new(window(rows(1))),
        right: Box::new(window(range(1))),
    };
    // At 1: {1} and {1, 1}; at 2: {1} and {1, 2}; at 3: {1} and {}.
    check_stream(of(ToStream::Insertions, relation()), &inputs, &[(1, 3, &[1]), (2, 1, &[2])]);
    let deletions = of(ToStream::Deletions, relation());
    check_stream(deletions, &inputs, &[(2, 1, &[1]), (3, 1, &[1]), (3, 1, &[2])]);
    check_stream(
        of(ToStream::Whole, relation()),
        &inputs,
        &[(1, 3, &[1]), (2, 2, &[1]), (2, 1, &[2]), (3, 1, &[1])],
    );
}

#[test]
fn rstream_has_rows_only_at_changes() {
    // At 2 the last row is another, equal one.
    let inputs = numbers(&[(1, 1), (2, 1), (3, 2)]);
    let whole = of(ToStream::Whole, window(rows(1)));
    check_stream(whole, &inputs, &[(1, 1, &[1]), (3, 1, &[2])]);
    // A relation that has become empty gives no rows.
    let whole = of(ToStream::Whole, window(range(2)));
    check_stream(whole, &numbers(&[(1, 1)]), &[(1, 1, &[1])]);
}

#[test]
fn a_window_on_a_derived_stream() {
    // Rows leave the inner window 3 ns after they arrive, and the outer window 2 ns later.
    let leave = Box::new(of(ToStream::Deletions, window(range(3))));
    let relation = Relation::Window(range(2), leave);
    check(relation, &numbers(&[(1, 1)]), &[(4, 1, &[1]), (6, -1, &[1])]);
    // Rows of one instant arrive in the order of their values: 3 is the last.
    let enter = Box::new(of(ToStream::Insertions, window(range(3))));
    let relation = Relation::Window(rows(1), enter);
    check(relation, &numbers(&[(1, 3), (1, 2)]), &[(1, 1, &[3])]);
}
