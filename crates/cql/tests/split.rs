//! The hosts and the centre together have the same result as the plan over the events of all hosts.

mod common;

use std::num::NonZeroU64;

use fathom_cql::aggregate::distinct::Precision;
use fathom_cql::aggregate::histogram::Buckets;
use fathom_cql::catalog::{Catalog, Column};
use fathom_cql::check::check;
use fathom_cql::generate::{Case, Generator, case, shrink};
use fathom_cql::oracle::{self, Delta, InputRow};
use fathom_cql::plan::{
    Aggregate, AggregateFunction as Function, Expression, Output, Plan, Relation, Stage, Stream,
    Window,
};
use fathom_cql::{Hosts, Row, Split, Type, Value, explain, split};

/// The number of cases of a test: `FATHOM_CASES`, or 4,000.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(4000)
}

/// The most steps of the oracle. Longer cases are skipped.
const STEPS_MAX: u64 = 1_000_000;

/// The host of an input, by the input's number.
fn host(input: usize, seed: u64, hosts: usize) -> usize {
    Generator::new(seed ^ (input as u64) << 32).below(hosts)
}

/// The inputs of the centre: the changes that the hosts send, host after host.
fn sent(split: &Split, inputs: &[Vec<InputRow>], until_ns: i64) -> Option<Vec<InputRow>> {
    let mut all = Vec::new();
    for inputs in inputs {
        for (source, fragment) in split.fragments.iter().enumerate() {
            let deltas = oracle::run_within(fragment, inputs, until_ns, STEPS_MAX)?;
            let input = |Delta { time_ns, row, count }| InputRow { source, time_ns, row, count };
            all.extend(deltas.into_iter().map(input));
        }
    }
    Some(all)
}

/// The inputs of each host.
fn spread(case: &Case, seed: u64, hosts: usize) -> Vec<Vec<InputRow>> {
    let mut inputs = vec![Vec::new(); hosts];
    for (at, input) in case.inputs.iter().enumerate() {
        inputs[host(at, seed, hosts)].push(input.clone());
    }
    inputs
}

/// The results of split plans; `None` if they take too many steps.
fn split_results(plans: &[Plan], case: &Case, seed: u64, hosts: Hosts) -> Option<Vec<Vec<Delta>>> {
    let split = split(plans, &case.catalog, hosts);
    for fragment in &split.fragments {
        check(fragment, &case.catalog).unwrap_or_else(|wrong| panic!("{wrong}: {fragment:?}"));
    }
    let inputs = split.catalog();
    for (plan, centre) in plans.iter().zip(&split.centre) {
        check(centre, &inputs).unwrap_or_else(|wrong| panic!("{wrong}: {centre:?}"));
        assert_eq!(centre.columns, plan.columns);
    }
    let many = if hosts == Hosts::One { 1 } else { 1 + (seed % 4) as usize };
    let sent = sent(&split, &spread(case, seed, many), case.until_ns)?;
    let result = |plan| oracle::run_within(plan, &sent, case.until_ns, STEPS_MAX);
    split.centre.iter().map(result).collect()
}

fn expected(plan: &Plan, case: &Case) -> Option<Vec<Delta>> {
    oracle::run_within(plan, &case.inputs, case.until_ns, STEPS_MAX)
}

/// Windows of rows depend on the order of rows of one instant, which is not kept between hosts. If
/// a plan has such a window, this keeps one row of each stream and instant.
fn without_ties(mut case: Case, plans: &[Plan]) -> Case {
    if plans.iter().any(|plan| rows_of_source(&plan.output)) {
        let mut seen = std::collections::BTreeSet::new();
        case.inputs.retain(|input| seen.insert((input.source, input.time_ns)));
    }
    case
}

fn rows_of_source(output: &Output) -> bool {
    let text = format!("{output:?}");
    let mut windows = text.split("Window(Rows {").skip(1);
    let arrives = |of: &str| of.starts_with("Source(") || of.starts_with("Of(Insertions");
    windows.any(|rest| rest.split_once("}, ").is_some_and(|(_, of)| arrives(of)))
}

/// Puts integers whose sums overflow into one case of three.
fn with_extremes(mut case: Case, seed: u64) -> Case {
    let mut generator = Generator::new(seed ^ 0x0e7e);
    if !generator.chance(33) {
        return case;
    }
    for value in case.inputs.iter_mut().flat_map(|input| &mut input.row) {
        if let (Value::Integer(number), true) = (&mut *value, generator.chance(40)) {
            let bits = generator.below(64);
            *number = match generator.below(4) {
                0 => i64::MAX,
                1 => i64::MIN,
                2 => (1_i64 << bits).wrapping_sub(1),
                _ => (generator.number() >> bits) as i64,
            };
        }
    }
    case
}

/// Gives about half of the range windows a slide.
fn sliding(relation: &mut Relation, slides: &mut Generator) {
    match relation {
        Relation::Window(window, stream) => {
            if let (Window::Range { slide_ns, .. }, true) = (window, slides.chance(50)) {
                *slide_ns = Some(2 + slides.below(4) as u64);
            }
            if let Stream::Of(_, of) = &mut **stream {
                sliding(of, slides);
            }
        }
        Relation::Given(_) => {}
        Relation::Filter(of, _)
        | Relation::Project(of, _)
        | Relation::Aggregate(of, ..)
        | Relation::Distinct(of)
        | Relation::Top(of, ..) => sliding(of, slides),
        Relation::Join(join) => {
            sliding(&mut join.left, slides);
            sliding(&mut join.right, slides);
        }
        Relation::Set { left, right, .. } => {
            sliding(left, slides);
            sliding(right, slides);
        }
    }
}

/// Groups a result by its first column, with aggregates that can be computed from parts.
fn grouped(plan: &mut Plan) {
    let Output::Relation(relation) = &mut plan.output else { return };
    let last = plan.columns.len() - 1;
    let number = plan.columns.iter().rposition(|column| column.kind == Type::Integer);
    let of = |function, column| Aggregate {
        function,
        argument: Some(Expression::Column(column)),
        distinct: false,
    };
    // Few registers, so that values share one.
    let few = Precision::new(4).unwrap();
    let mut aggregates = vec![
        Aggregate { function: Function::Count, argument: None, distinct: false },
        of(Function::Maximum, last),
        of(Function::ApproximateDistinct(few, Stage::Whole), last),
    ];
    let column = |name: &str, kind| Column { name: name.to_owned(), kind };
    let mut columns = vec![
        plan.columns[0].clone(),
        column("n", Type::Integer),
        column("m", plan.columns[last].kind),
        column("d", Type::Integer),
    ];
    if let Some(number) = number {
        let by_two = Buckets::Integers(NonZeroU64::MIN.saturating_add(1));
        aggregates.extend([
            of(Function::Sum, number),
            of(Function::Average, number),
            of(Function::Histogram(Buckets::PowersOfTwo, Stage::Whole), number),
            of(Function::Histogram(by_two, Stage::Whole), number),
        ]);
        columns.extend([column("s", Type::Integer), column("a", Type::Float)]);
        columns.extend([column("h", Type::Text), column("w", Type::Text)]);
    }
    let below = std::mem::replace(relation, Relation::Given(0));
    *relation = Relation::Aggregate(Box::new(below), vec![Expression::Column(0)], aggregates);
    plan.columns = columns;
}

/// Adds windows that slide, and groups, of which random plans have too few.
fn with_groups(mut case: Case, seed: u64) -> Case {
    let mut generator = Generator::new(seed ^ 0x5eed);
    if generator.chance(50) {
        match &mut case.plan.output {
            Output::Relation(of) => sliding(of, &mut generator),
            Output::Stream(Stream::Of(_, of)) => sliding(of, &mut generator),
            Output::Stream(Stream::Source(_)) => {}
        }
    }
    if generator.chance(10) {
        let source = generator.below(2);
        let columns = case.catalog.streams[source].columns.clone();
        let length_ns = 1 + generator.below(12) as u64;
        let window = Window::Range { length_ns, slide_ns: Some(2 + generator.below(5) as u64) };
        let relation = Relation::Window(window, Box::new(Stream::Source(source)));
        case.plan = Plan { output: Output::Relation(relation), columns };
        grouped(&mut case.plan);
    } else if generator.chance(25) {
        grouped(&mut case.plan);
    }
    case
}

fn differs(plans: &[Plan], case: &Case, seed: u64, hosts: Hosts) -> bool {
    let Some(is) = split_results(plans, case, seed, hosts) else { return false };
    plans.iter().zip(is).any(|(plan, is)| expected(plan, case).is_some_and(|want| want != is))
}

fn prepared(seed: u64) -> Case {
    let case = with_extremes(with_groups(case(seed), seed), seed);
    let plan = case.plan.clone();
    without_ties(case, &[plan])
}

fn fail(seed: u64, case: Case, hosts: Hosts) -> ! {
    let differs = |case: &Case| {
        let ties = without_ties(case.clone(), std::slice::from_ref(&case.plan));
        differs(std::slice::from_ref(&case.plan), &ties, seed, hosts)
    };
    let small = shrink(case, &mut |case| differs(case));
    let plans = std::slice::from_ref(&small.plan);
    panic!(
        "seed {seed}, {hosts:?}:\n{:?}\nsplit: {:?}\ninputs: {:?}\nexpected: {:?}\nis: {:?}",
        small.plan,
        split(plans, &small.catalog, hosts),
        small.inputs,
        expected(&small.plan, &small),
        split_results(plans, &small, seed, hosts)
    );
}

/// The number of fragments of each kind.
#[derive(Debug, Default)]
struct Seen {
    streams: u64,
    groups: u64,
    distinct: u64,
    first: u64,
    sums: u64,
    registers: u64,
    histograms: u64,
    narrower: u64,
}

impl Seen {
    fn add(&mut self, fragment: &Plan) {
        let text = format!("{:?}", fragment.output);
        let begins = |name| u64::from(text.starts_with(&format!("Relation({name}(")));
        self.streams += u64::from(text.starts_with("Stream("));
        self.groups += begins("Aggregate");
        self.distinct += begins("Distinct");
        self.first += begins("Top");
        self.sums += u64::from(text.contains("Literal(Integer(4294967296))"));
        self.registers += u64::from(text.contains("ApproximateDistinct(Precision(4), Part)"));
        self.histograms += u64::from(text.contains("Histogram(Integers(2), Part)"));
        self.narrower += u64::from(text.starts_with("Stream(Of(Insertions, Project"));
    }
}

#[test]
fn many_hosts_and_a_centre_have_the_result_of_the_plan() {
    let (mut compared, mut changes, mut seen) = (0, 0, Seen::default());
    for seed in 0..cases() {
        let case = prepared(seed);
        let plans = std::slice::from_ref(&case.plan);
        let Some(expected) = expected(&case.plan, &case) else { continue };
        let Some(is) = split_results(plans, &case, seed, Hosts::Many) else { continue };
        for fragment in split(plans, &case.catalog, Hosts::Many).fragments {
            seen.add(&fragment);
        }
        compared += 1;
        changes += expected.len() as u64;
        if is[0] != expected {
            fail(seed, case, Hosts::Many);
        }
    }
    assert!(compared * 10 >= cases() * 9, "only {compared} cases were small enough");
    assert!(changes > cases(), "{changes} changes are too few");
    let Seen { streams, groups, distinct, first, sums, registers, histograms, narrower } = seen;
    assert!(streams > cases() / 2 && narrower > cases() / 8, "{seen:?}");
    let least = groups.min(distinct).min(first);
    assert!(least.min(sums) > cases() / 50, "{seen:?}");
    assert!(registers.min(histograms) > cases() / 50, "{seen:?}");
}

#[test]
fn the_only_host_computes_everything() {
    for seed in 0..cases() / 4 {
        let case = case(seed);
        let plans = std::slice::from_ref(&case.plan);
        let parts = split(plans, &case.catalog, Hosts::One);
        assert_eq!(parts.fragments[0].output, case.plan.output);
        if differs(plans, &case, seed, Hosts::One) {
            fail(seed, case, Hosts::One);
        }
    }
}

#[test]
fn several_plans_are_split_together() {
    let (mut shared, mut compared) = (0, 0);
    for seed in 0..cases() / 4 {
        let mut plans: Vec<Plan> = (0..3).map(|other| case(seed * 3 + other).plan).collect();
        plans.push(plans[0].clone());
        let case = without_ties(case(seed), &plans);
        let alone: usize = plans
            .iter()
            .map(|plan| {
                let plan = std::slice::from_ref(plan);
                split(plan, &case.catalog, Hosts::Many).fragments.len()
            })
            .sum();
        let parts = split(&plans, &case.catalog, Hosts::Many);
        shared += usize::from(parts.fragments.len() + 1 < alone);
        let Some(is) = split_results(&plans, &case, seed, Hosts::Many) else { continue };
        for (plan, is) in plans.iter().zip(is) {
            let Some(expected) = expected(plan, &case) else { continue };
            assert_eq!(is, expected, "seed {seed}: {plan:?}\n{parts:?}\n{:?}", case.inputs);
            compared += 1;
        }
    }
    assert!(compared > cases() / 2 && shared > 20, "{compared} compared, {shared} shared");
}

#[test]
fn sums_that_a_host_cannot_hold_are_exact() {
    let text = "select sum(ReqId) as s, avg(ReqId) as a, count(ReqId) as n, count(*) as all_of_it \
                from IOstream [range 4 nanoseconds slide 4 nanoseconds]";
    let plan = common::try_plan(text).expect("a plan").queries.remove(0).plan;
    let catalog = common::catalog();
    let row = |number: Option<i64>| -> Row {
        let columns = catalog.streams[0].columns.len();
        let mut row = vec![Value::Null; columns];
        row[3] = number.map_or(Value::Null, Value::Integer);
        row
    };
    let (least, most) = (i64::MIN, i64::MAX);
    for numbers in [
        // Each host's sum overflows, but the sum of both does not.
        &[(0, Some(most)), (0, Some(most)), (1, Some(least)), (1, Some(least))][..],
        &[(0, Some(most)), (1, Some(1))],
        &[(0, Some(least)), (1, Some(-1))],
        &[(0, Some(most - 1)), (1, Some(1))],
        &[(0, Some(least + 1)), (1, Some(-1))],
        &[(0, Some(-1)), (1, Some(-4_294_967_296)), (1, Some(4_294_967_295))],
        &[(0, None), (1, Some(most)), (1, Some(most)), (0, Some(most)), (2, Some(3))],
        &[(0, None), (1, None)],
    ] {
        let input = |number| InputRow { source: 0, time_ns: 1, row: row(number), count: 1 };
        let all: Vec<InputRow> = numbers.iter().map(|&(_, number)| input(number)).collect();
        let mut inputs = vec![Vec::new(); 3];
        for (&(host, _), input) in numbers.iter().zip(&all) {
            inputs[host].push(input.clone());
        }
        let parts = split(std::slice::from_ref(&plan), &catalog, Hosts::Many);
        let sent = sent(&parts, &inputs, 9).expect("few steps");
        let expected = oracle::run(&plan, &all, 9);
        assert_eq!(oracle::run(&parts.centre[0], &sent, 9), expected, "{numbers:?}");
        assert_eq!(expected.len(), 2);
    }
}

/// The plans of the hosts and of the centre, as text.
fn parts(text: &str) -> String {
    let planned = common::try_plan(text).unwrap_or_else(|wrong| panic!("{wrong:?}"));
    let plans: Vec<Plan> = planned.queries.into_iter().map(|query| query.plan).collect();
    let catalog: Catalog = common::catalog();
    let parts = split(&plans, &catalog, Hosts::Many);
    let hosts = parts.fragments.iter().map(|plan| explain(plan, &catalog));
    let centre = parts.centre.iter().map(|plan| explain(plan, &parts.catalog()));
    hosts.chain(centre).collect()
}

#[test]
fn filters_and_columns() {
    let text = "select VDisk, Size * 512 as bytes from IOstream where Type = 'Q' and Size > 8";
    let expected = "\
stream (VDisk text, bytes integer)
  istream
    project VDisk, Size * 512 as bytes
      filter Type = 'Q' and Size > 8
        window unbounded
          stream IOstream
stream (VDisk text, bytes integer)
  stream fragment 1
";
    assert_eq!(parts(text), expected);
    // A median needs all values.
    let text = "select VDisk, median(Size) as m from IOstream [range 5 seconds slide 1 second]
                where Type = 'Q' group by VDisk";
    let expected = "\
stream (Size integer, VDisk text)
  istream
    project Size, VDisk
      filter Type = 'Q'
        window unbounded
          stream IOstream
relation (VDisk text, m integer)
  aggregate percentile(Size, 50) by VDisk
    window range 5 s slide 1 s
      stream fragment 1
";
    assert_eq!(parts(text), expected);
    let text = "select count(*) as n from IOstream [rows 100] where Type = 'Q'";
    let expected = "\
stream (Type text)
  istream
    project Type
      window unbounded
        stream IOstream
relation (n integer)
  aggregate count(*)
    filter Type = 'Q'
      window rows 100
        stream fragment 1
";
    assert_eq!(parts(text), expected);
}

#[test]
fn conditions_are_pushed_to_their_side_of_a_join() {
    let text = "create view Pairs as
        select q.VDisk as Disk, q.Size as Size, r.BlktapTS - q.BlktapTS as ns
        from IOstream [range 1 second] as q left join IOstream [now] as r
        on q.ReqId = r.ReqId and r.Type = 'R' and q.Size > 0;
        select ns from Pairs where Disk = 'a' and ns > 5";
    let expected = "\
stream (BlktapTS integer, ReqId integer, Size integer)
  istream
    project BlktapTS, ReqId, Size
      filter VDisk = 'a'
        window unbounded
          stream IOstream
stream (BlktapTS integer, ReqId integer)
  istream
    project BlktapTS, ReqId
      filter Type = 'R'
        window unbounded
          stream IOstream
relation (ns integer)
  project column1 as ns
    filter column1 > 5
      project BlktapTS' - BlktapTS as column1
        left join on ReqId = ReqId' and Size > 0
          window range 1 s
            stream fragment 1
          window now
            stream fragment 2
";
    assert_eq!(parts(text), expected);
}

#[test]
fn groups_of_windows_that_slide_are_sent() {
    let text = "select VDisk, count(*) as n, max(Size) as most, avg(Size) as mean,
        sum(case when IOOp = 'f' then 1 else 0 end) as flushes
        from IOstream [tumbling 1 second] group by VDisk";
    let shown = parts(text);
    assert!(shown.contains("by VDisk\n    window range 1 s slide 1 s\n"), "{shown}");
    assert!(shown.contains("aggregate count(*), max(Size), count(Size), sum(Size / 4294967296)"));
    assert!(shown.contains("sum(case when IOOp = 'f' then 1 else 0 end)"), "{shown}");
    assert!(shown.contains("    aggregate sum(count(*)), max(max(Size)), sum(count(Size))"));
    assert!(shown.ends_with("      relation fragment 1\n"), "{shown}");
    // Without a slide each row changes its group, so the rows are sent.
    let shown = parts("select VDisk, count(*) from IOstream [range 1 second] group by VDisk");
    assert!(shown.starts_with("stream (VDisk text)\n"), "{shown}");
    // But most rows do not change the maximum.
    let shown = parts("select VDisk, max(Size) from IOstream [range 1 second] group by VDisk");
    assert!(shown.starts_with("relation (VDisk text, max(Size) integer)\n"), "{shown}");
    let shown = parts("select VDisk, max(Size) from IOstream [now] group by VDisk");
    assert!(shown.starts_with("stream (Size integer, VDisk text)\n"), "{shown}");
    // Histograms and registers are sent as texts and merged.
    let shown = parts(
        "select VDisk, histogram(Size, 8) as sizes, approx_count_distinct(Path, 10)
        from IOstream [tumbling 1 second] group by VDisk",
    );
    assert!(shown.contains("\n  aggregate histogram(Size, 8), registers(Path, 10) by VDisk\n"));
    assert!(
        shown.contains(
            "\n  aggregate sum_of_histograms(histogram(Size, 8), 8), \
        count_of_registers(registers(Path, 10), 10) by VDisk\n"
        ),
        "{shown}"
    );
    let shown = parts(
        "select VDisk, approx_count_distinct(Path) from IOstream [tumbling 1 second]
        group by VDisk",
    );
    assert!(shown.contains("\n  aggregate registers(Path) by VDisk\n"), "{shown}");
    // Registers are too long to be sent for each row: over other windows each value of a group is
    // sent once.
    let shown = parts(
        "select VDisk, approx_count_distinct(Path) from IOstream [range 1 second]
        group by VDisk",
    );
    assert!(shown.starts_with("relation (VDisk text, Path text)\n  distinct\n"), "{shown}");
    let shown =
        parts("select VDisk, histogram(Size) from IOstream [range 1 second] group by VDisk");
    assert!(shown.starts_with("stream (Size integer, VDisk text)\n"), "{shown}");
    // The most frequent values of all hosts cannot be computed from those of each host.
    let shown =
        parts("select VDisk, top_k(Path, 3) from IOstream [tumbling 1 second] group by VDisk");
    assert!(shown.starts_with("stream (VDisk text, Path text)\n"), "{shown}");
    // The sums of floats of each host would be rounded before they are added.
    let shown = parts("select sum(Share) from Load [tumbling 1 second]");
    assert!(shown.starts_with("stream (Share float)\n"), "{shown}");
}

#[test]
fn hosts_send_distinct_and_first_rows() {
    let text = "select VDisk from IOstream [range 60 seconds]
                except select VDisk from IOstream [range 10 seconds]";
    let expected = "\
relation (VDisk text)
  distinct
    project VDisk
      window range 1 min
        stream IOstream
relation (VDisk text)
  distinct
    project VDisk
      window range 10 s
        stream IOstream
relation (VDisk text)
  except
    relation fragment 1
    relation fragment 2
";
    assert_eq!(parts(text), expected);
    let text = "select Cgroup, count(distinct Path) as paths from IOstream [range 9 seconds]
                group by Cgroup";
    let expected = "\
relation (Cgroup text, Path text)
  distinct
    project Cgroup, Path
      window range 9 s
        stream IOstream
relation (Cgroup text, paths integer)
  aggregate count(distinct Path) by Cgroup
    relation fragment 1
";
    assert_eq!(parts(text), expected);
    let text = "select Path, Size from IOstream [range 9 seconds] order by Size desc limit 3";
    let shown = parts(text);
    assert_eq!(shown.matches("first 3 by Size desc").count(), 2, "{shown}");
    assert!(shown.starts_with("relation (Path text, Size integer)\n"), "{shown}");
}

#[test]
fn common_data_is_sent_once() {
    let text = "select Size from IOstream [range 1 second] where Type = 'Q';
                select VDisk, sum(Size) from IOstream [range 2 seconds] where Type = 'Q'
                group by VDisk;
                select Size, VDisk from IOstream [range 3 seconds] where Type = 'Q' and Size > 1;";
    let shown = parts(text);
    assert_eq!(shown.matches("stream IOstream").count(), 3, "{shown}");
    let same = "select count(*) from IOstream [range 1 second] where Type = 'Q';
                select VDisk, sum(Size) from IOstream [range 2 seconds] where Type = 'Q'
                group by VDisk;";
    let shown = parts(same);
    assert!(shown.starts_with("stream (Size integer, VDisk text)\n"), "{shown}");
    assert_eq!(shown.matches("stream IOstream").count(), 1, "{shown}");
    assert_eq!(shown.matches("stream fragment 1").count(), 2, "{shown}");
}

#[test]
fn results_of_the_only_host_stay_in_order() {
    let text = "select VDisk, count(*) as n from IOstream group by VDisk order by n desc, VDisk";
    let planned = common::try_plan(text).expect("a plan");
    let plans = [planned.queries[0].plan.clone()];
    let parts = split(&plans, &common::catalog(), Hosts::One);
    let shown = explain(&parts.centre[0], &parts.catalog());
    let expected =
        "relation (VDisk text, n integer)\n  order by n desc, VDisk\n    relation fragment 1\n";
    assert_eq!(shown, expected);
}
