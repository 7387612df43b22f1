use std::fmt::Write;

use super::plans::Kind;
use super::*;
use crate::check::{self, check};
use crate::eval::evaluate;
use crate::value::{Row, Value};

const CASES: u64 = 2000;

/// Parts of the debug output of plans: one for each feature of plans.
const PARTS: &str = "\
    Source(0)|Source(1)|Insertions|Deletions|Whole|Unbounded|Filter|slide_ns: None|\
    slide_ns: Some|by: []|by: [1|rows: 0|rows: 4|Project|: Inner|: Left|: Right|: Full|equal: []|\
    residual: None|residual: Some|Distinct(W|Union|Except|Intersect|all: true|all: false|\
    Top|descending: true|: Count|Sum|Average|Minimum|Maximum|Variance|StandardDeviation|\
    Percentile|MostFrequent|ApproximateDistinct(Precision(4)|ApproximateDistinct(Precision(12)|\
    Histogram(PowersOfTwo|Histogram(Integers|Histogram(Floats|argument: None|distinct: true|(Not,|(Negate,|(And,|(Or,|\
    NotEqual|LessOrEqual|GreaterOrEqual|(Add,|Subtract|Multiply|Divide|Remainder|\
    Concatenate|IsNull|Like(|Cast(|Case(|Lower|Upper|Length|Substring|Position|StartsWith|\
    EndsWith|Replace|SplitPart|Trim|Absolute|Floor|Ceiling|Round|SquareRoot|Logarithm|\
    Power|Greatest|Least|Coalesce";

#[test]
fn cases_are_well_formed_and_cover_everything() {
    let mut plans = String::new();
    let mut with_result = 0;
    for seed in 0..CASES {
        let case = case(seed);
        check(&case.plan, &case.catalog).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        assert!(case.inputs.len() <= 60);
        assert!(case.inputs.is_sorted_by_key(|input| input.time_ns));
        assert!(case.inputs.iter().all(|input| (0..=case.until_ns).contains(&input.time_ns)));
        let result = oracle::run(&case.plan, &case.inputs, case.until_ns);
        assert!(result.is_sorted());
        with_result += u64::from(!result.is_empty());
        writeln!(plans, "{:?}", case.plan).unwrap();
    }
    assert!(with_result > CASES * 8 / 10, "only {with_result} have results");
    for part in PARTS.split('|') {
        let count = plans.lines().filter(|plan| plan.contains(part)).count();
        assert!(count > 5, "{part} is in {count} plans");
    }
}

#[test]
fn a_seed_always_gives_the_same_case() {
    assert_eq!(case(7), case(7));
    assert_ne!(case(7), case(8));
    let mut generator = Generator::new(0);
    assert_eq!(generator.number(), 0xe220_a839_7b1d_cdaf);
    assert_eq!(generator.below(0), 0);
}

#[test]
fn some_cases_are_large() {
    let sizes: Vec<usize> = (0..CASES).map(|seed| case(seed).inputs.len()).collect();
    assert!(sizes.iter().filter(|size| **size > 40).count() > 100);
    assert!(sizes.contains(&0));
}

#[test]
fn a_shrunk_case_still_fails() {
    // A case "fails" if it has a full join and a row of the result changes by a count of 2.
    let fails = |case: &Case| {
        let result = oracle::run(&case.plan, &case.inputs, case.until_ns);
        let twice = result.iter().any(|delta| delta.count == 2);
        twice && format!("{:?}", case.plan).contains("Full")
    };
    let mut shrunk = 0;
    for case in (0..500).map(case).filter(fails) {
        let small = shrink(case.clone(), &mut |case| fails(case));
        assert!(fails(&small) && check(&small.plan, &small.catalog).is_ok());
        assert!(small.inputs.len() <= 8, "{small:?}");
        shrunk += 1;
    }
    assert!(shrunk > 5, "{shrunk}");
}

#[test]
fn expressions_have_values_of_their_type_and_never_panic() {
    let types = [Type::Integer, Type::Integer, Type::Float, Type::Text, Type::Boolean];
    let columns = types.map(|kind| Kind { kind });
    let values = [
        vec![i64::MIN, i64::MAX, -1, 0, 1].into_iter().map(Value::Integer).collect(),
        vec![f64::NAN, f64::INFINITY, -0.0, f64::MAX, f64::MIN_POSITIVE, -1e19]
            .into_iter()
            .map(Value::Float)
            .collect(),
        ["", "ä", "%_%", "9223372036854775808", " -1 "].map(Value::text).to_vec(),
        vec![Value::Boolean(false), Value::Boolean(true)],
    ];
    let every: Vec<Value> = values.concat();
    let mut generator = Generator::new(1);
    for _ in 0..6_000 {
        let kind = generator.one_of(&types);
        let expression = generator.expression(kind, &columns, 4);
        let fitting = |generator: &mut Generator, kind: Type| {
            let values: &Vec<Value> =
                values.iter().find(|values| values[0].kind() == Some(kind)).unwrap();
            if generator.chance(10) { Value::Null } else { generator.one_of(values) }
        };
        let row: Row = types.iter().map(|kind| fitting(&mut generator, *kind)).collect();
        let value = evaluate(&expression, &row);
        assert!(value.is_null() || value.kind() == Some(kind), "{expression:?} is {value:?}");
        assert_eq!(
            check::kind(&expression, &types.map(Some)).map(|of| of.unwrap_or(kind)),
            Ok(kind)
        );
        let length = generator.below(7);
        let wrong: Row = (0..length).map(|_| generator.one_of(&every)).collect();
        evaluate(&expression, &wrong);
    }
}
