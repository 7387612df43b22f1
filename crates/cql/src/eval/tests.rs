use std::slice;

use super::*;
use crate::plan::Function;

fn literal(value: Value) -> Expression {
    Expression::Literal(value)
}

fn int(number: i64) -> Value {
    Value::Integer(number)
}

fn flt(number: f64) -> Value {
    Value::Float(number)
}

fn txt(text: &str) -> Value {
    Value::text(text)
}

const NULL: Value = Value::Null;
const TRUE: Value = Value::Boolean(true);
const FALSE: Value = Value::Boolean(false);

fn two(operator: BinaryOperator, left: Value, right: Value) -> Value {
    let (left, right) = (Box::new(literal(left)), Box::new(literal(right)));
    evaluate(&Expression::Binary(operator, left, right), &[])
}

fn one(operator: UnaryOperator, operand: Value) -> Value {
    evaluate(&Expression::Unary(operator, Box::new(literal(operand))), &[])
}

fn to(value: Value, kind: Type) -> Value {
    evaluate(&Expression::Cast(Box::new(literal(value)), kind), &[])
}

fn call(function: Function, arguments: &[Value]) -> Value {
    let arguments = arguments.iter().cloned().map(literal).collect();
    evaluate(&Expression::Call(function, arguments), &[])
}

#[test]
fn logic_has_three_values() {
    use BinaryOperator::{And, Or};
    let table = [
        (TRUE, TRUE, TRUE, TRUE),
        (TRUE, FALSE, FALSE, TRUE),
        (TRUE, NULL, NULL, TRUE),
        (FALSE, FALSE, FALSE, FALSE),
        (FALSE, NULL, FALSE, NULL),
        (NULL, NULL, NULL, NULL),
    ];
    for (left, right, and, or) in table {
        for (left, right) in [(left.clone(), right.clone()), (right, left)] {
            assert_eq!(two(And, left.clone(), right.clone()), and, "{left:?} and {right:?}");
            assert_eq!(two(Or, left.clone(), right.clone()), or, "{left:?} or {right:?}");
        }
    }
    assert_eq!(one(UnaryOperator::Not, TRUE), FALSE);
    assert_eq!(one(UnaryOperator::Not, NULL), NULL);
    assert_eq!(two(And, TRUE, int(1)), NULL);
    assert!(is_true(&TRUE) && !is_true(&FALSE) && !is_true(&NULL) && !is_true(&int(1)));
}

#[test]
fn comparisons() {
    use BinaryOperator::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
    assert_eq!(two(Equal, int(1), int(1)), TRUE);
    assert_eq!(two(NotEqual, int(1), int(1)), FALSE);
    assert_eq!(two(Less, txt("a"), txt("b")), TRUE);
    assert_eq!(two(LessOrEqual, FALSE, TRUE), TRUE);
    assert_eq!(two(GreaterOrEqual, flt(0.0), flt(-0.0)), TRUE);
    assert_eq!(two(Equal, flt(0.0), flt(-0.0)), TRUE);
    assert_eq!(two(Equal, flt(f64::NAN), flt(-f64::NAN)), TRUE);
    assert_eq!(two(Greater, flt(f64::NAN), flt(f64::INFINITY)), TRUE);
    for operator in [Equal, NotEqual, Less, LessOrEqual, Greater, GreaterOrEqual] {
        assert_eq!(two(operator, NULL, NULL), NULL);
        assert_eq!(two(operator, int(1), NULL), NULL);
        assert_eq!(two(operator, int(1), flt(1.0)), NULL);
    }
    let null = Expression::IsNull(Box::new(Expression::Column(7)));
    assert_eq!(evaluate(&null, &[]), TRUE);
}

#[test]
fn arithmetic_of_integers() {
    use BinaryOperator::{Add, Divide, Multiply, Remainder, Subtract};
    assert_eq!(two(Add, int(i64::MAX), int(1)), NULL);
    assert_eq!(two(Subtract, int(i64::MIN), int(1)), NULL);
    assert_eq!(two(Multiply, int(i64::MAX), int(2)), NULL);
    assert_eq!(two(Divide, int(-7), int(2)), int(-3));
    assert_eq!(two(Remainder, int(-7), int(2)), int(-1));
    assert_eq!(two(Divide, int(1), int(0)), NULL);
    assert_eq!(two(Remainder, int(1), int(0)), NULL);
    assert_eq!(two(Divide, int(i64::MIN), int(-1)), NULL);
    assert_eq!(two(Remainder, int(i64::MIN), int(-1)), int(0));
    assert_eq!(one(UnaryOperator::Negate, int(i64::MIN)), NULL);
    assert_eq!(one(UnaryOperator::Negate, int(3)), int(-3));
    assert_eq!(one(UnaryOperator::Negate, TRUE), NULL);
    assert_eq!(two(Add, txt("a"), txt("b")), NULL);
}

#[test]
fn arithmetic_of_floats() {
    use BinaryOperator::{Add, Divide, Multiply, Remainder, Subtract};
    assert_eq!(two(Divide, flt(1.0), flt(0.0)), NULL);
    assert_eq!(two(Divide, flt(1.0), flt(-0.0)), NULL);
    assert_eq!(two(Remainder, flt(1.0), flt(0.0)), NULL);
    assert_eq!(two(Remainder, flt(-7.5), flt(2.0)), flt(-1.5));
    assert_eq!(two(Multiply, flt(1e308), flt(10.0)), flt(f64::INFINITY));
    assert_eq!(two(Subtract, flt(f64::INFINITY), flt(f64::INFINITY)), NULL);
    assert_eq!(two(Add, flt(f64::NAN), flt(1.0)), NULL);
}

#[test]
fn zero_has_no_sign() {
    let signs = [
        one(UnaryOperator::Negate, flt(0.0)),
        two(BinaryOperator::Multiply, flt(-1.0), flt(0.0)),
        call(Function::Ceiling, &[flt(-0.5)]),
        call(Function::Round, &[flt(-0.25)]),
        to(txt("-0.0"), Type::Float),
        evaluate(&Expression::Column(0), &[flt(-0.0)]),
        evaluate(&literal(flt(-0.0)), &[]),
    ];
    for value in signs {
        assert_eq!(to(value, Type::Text), txt("0"));
    }
}

#[test]
fn casts() {
    use Type::{Boolean, Float, Integer, Text};
    assert_eq!(to(flt(-2.9), Integer), int(-2));
    assert_eq!(to(flt(9_223_372_036_854_775_808.0), Integer), NULL);
    assert_eq!(to(flt(-9_223_372_036_854_775_808.0), Integer), int(i64::MIN));
    assert_eq!(to(flt(f64::NAN), Integer), NULL);
    assert_eq!(to(flt(f64::NEG_INFINITY), Integer), NULL);
    assert_eq!(to(int(3), Float), flt(3.0));
    assert_eq!(to(txt(" -12 "), Integer), int(-12));
    assert_eq!(to(txt("12.0"), Integer), NULL);
    assert_eq!(to(txt("9223372036854775808"), Integer), NULL);
    assert_eq!(to(txt(""), Integer), NULL);
    assert_eq!(to(txt(" 1.5e2"), Float), flt(150.0));
    assert_eq!(to(txt("nan"), Float), NULL);
    assert_eq!(to(txt("x"), Float), NULL);
    assert_eq!(to(int(-5), Text), txt("-5"));
    assert_eq!(to(flt(2.5), Text), txt("2.5"));
    assert_eq!(to(TRUE, Text), txt("true"));
    assert_eq!(to(TRUE, Integer), int(1));
    assert_eq!(to(int(0), Boolean), FALSE);
    assert_eq!(to(int(1), Boolean), TRUE);
    assert_eq!(to(int(2), Boolean), NULL);
    assert_eq!(to(txt("True "), Boolean), TRUE);
    assert_eq!(to(txt("yes"), Boolean), NULL);
    assert_eq!(to(flt(1.0), Boolean), NULL);
    for kind in [Boolean, Integer, Float, Text] {
        assert_eq!(to(NULL, kind), NULL);
    }
}

#[test]
fn patterns() {
    for (text, pattern, expected) in [
        ("", "", true),
        ("", "%", true),
        ("", "_", false),
        ("a", "", false),
        ("abc", "abc", true),
        ("abc", "a%", true),
        ("abc", "%c", true),
        ("abc", "%b%", true),
        ("abc", "a_c", true),
        ("abc", "a_", false),
        ("abc", "%%__%", true),
        ("ab", "___%", false),
        ("äöü", "_ö_", true),
        ("abcabd", "%ab_", true),
        ("aab", "%ab", true),
        ("mississippi", "m%iss%pi", true),
        ("mississippi", "m%iss%pj", false),
        ("a%", "a\\%", false),
        ("A", "a", false),
    ] {
        assert_eq!(like(text, pattern), expected, "{text} like {pattern}");
    }
    // A matcher that tries every combination would not return.
    let text = "a".repeat(5000);
    assert!(!like(&text, &format!("{}b", "%a".repeat(500))));
    assert!(like(&text, &"%a".repeat(500)));
    let both = |left, right| Expression::Like(Box::new(literal(left)), Box::new(literal(right)));
    assert_eq!(evaluate(&both(txt("ab"), txt("a_")), &[]), TRUE);
    assert_eq!(evaluate(&both(NULL, txt("%")), &[]), NULL);
    assert_eq!(evaluate(&both(txt("1"), int(1)), &[]), NULL);
}

#[test]
fn cases() {
    let branch = |condition, value| (literal(condition), literal(value));
    let case = |otherwise| {
        let branches = vec![branch(NULL, int(1)), branch(FALSE, int(2))];
        Expression::Case(branches, otherwise)
    };
    assert_eq!(evaluate(&case(None), &[]), NULL);
    assert_eq!(evaluate(&case(Some(Box::new(literal(int(4))))), &[]), int(4));
    let case = Expression::Case(vec![branch(TRUE, int(1)), branch(TRUE, int(2))], None);
    assert_eq!(evaluate(&case, &[]), int(1));
}

#[test]
fn functions_of_texts() {
    use Function::{
        EndsWith, Length, Lower, Position, Replace, SplitPart, StartsWith, Substring, Trim, Upper,
    };
    assert_eq!(call(Lower, &[txt("ÄB")]), txt("äb"));
    assert_eq!(call(Upper, &[txt("äb")]), txt("ÄB"));
    assert_eq!(call(Length, &[txt("äöü")]), int(3));
    assert_eq!(call(Trim, &[txt(" a b\t")]), txt("a b"));
    assert_eq!(call(Substring, &[txt("hällo"), int(2)]), txt("ällo"));
    assert_eq!(call(Substring, &[txt("hällo"), int(2), int(2)]), txt("äl"));
    assert_eq!(call(Substring, &[txt("hello"), int(0), int(3)]), txt("he"));
    assert_eq!(call(Substring, &[txt("hello"), int(-5), int(2)]), txt(""));
    assert_eq!(call(Substring, &[txt("hello"), int(9)]), txt(""));
    assert_eq!(call(Substring, &[txt("hello"), int(1), int(-1)]), NULL);
    assert_eq!(call(Substring, &[txt("hello"), int(i64::MIN), int(i64::MAX)]), txt(""));
    assert_eq!(call(Substring, &[txt("hello"), int(i64::MAX), int(i64::MAX)]), txt(""));
    assert_eq!(call(Position, &[txt("l"), txt("hällo")]), int(3));
    assert_eq!(call(Position, &[txt("x"), txt("hällo")]), int(0));
    assert_eq!(call(Position, &[txt(""), txt("")]), int(1));
    assert_eq!(call(StartsWith, &[txt("hello"), txt("he")]), TRUE);
    assert_eq!(call(EndsWith, &[txt("hello"), txt("he")]), FALSE);
    assert_eq!(call(Replace, &[txt("aXbX"), txt("X"), txt("--")]), txt("a--b--"));
    assert_eq!(call(Replace, &[txt("ab"), txt(""), txt("-")]), txt("ab"));
    for (position, part) in [(1, "a"), (2, ""), (3, "b"), (4, ""), (0, ""), (-1, "")] {
        assert_eq!(call(SplitPart, &[txt("a,,b"), txt(","), int(position)]), txt(part));
    }
    assert_eq!(call(SplitPart, &[txt("ab"), txt(""), int(1)]), txt("ab"));
    assert_eq!(call(SplitPart, &[txt("ab"), txt(","), int(i64::MIN)]), txt(""));
    assert_eq!(call(Length, &[NULL]), NULL);
    assert_eq!(call(Length, &[int(5)]), NULL);
    assert_eq!(call(Length, &[]), NULL);
}

#[test]
fn functions_of_numbers() {
    use Function::{
        Absolute, Ceiling, Coalesce, Floor, Greatest, Least, Logarithm, Power, Round, SquareRoot,
    };
    assert_eq!(call(Absolute, &[int(-3)]), int(3));
    assert_eq!(call(Absolute, &[int(i64::MIN)]), NULL);
    assert_eq!(call(Absolute, &[flt(-3.5)]), flt(3.5));
    assert_eq!(call(Floor, &[flt(-1.5)]), flt(-2.0));
    assert_eq!(call(Ceiling, &[flt(1.25)]), flt(2.0));
    assert_eq!(call(Round, &[flt(2.5)]), flt(3.0));
    assert_eq!(call(Round, &[flt(-2.5)]), flt(-3.0));
    assert_eq!(call(SquareRoot, &[flt(9.0)]), flt(3.0));
    assert_eq!(call(SquareRoot, &[flt(-1.0)]), NULL);
    assert_eq!(call(Logarithm, &[flt(1.0)]), flt(0.0));
    assert_eq!(call(Logarithm, &[flt(0.0)]), NULL);
    assert_eq!(call(Logarithm, &[flt(f64::NAN)]), NULL);
    assert_eq!(call(Power, &[flt(2.0), flt(10.0)]), flt(1024.0));
    assert_eq!(call(Power, &[flt(-1.0), flt(0.5)]), NULL);
    assert_eq!(call(Power, &[flt(0.0), flt(-1.0)]), NULL);
    assert_eq!(call(Greatest, &[int(1), int(3), int(2)]), int(3));
    assert_eq!(call(Least, &[txt("b"), txt("a")]), txt("a"));
    assert_eq!(call(Greatest, &[int(1), NULL]), NULL);
    assert_eq!(call(Greatest, &[int(1), txt("a")]), NULL);
    assert_eq!(call(Greatest, &[]), NULL);
    assert_eq!(call(Coalesce, &[NULL, int(2), int(3)]), int(2));
    assert_eq!(call(Coalesce, &[NULL]), NULL);
}

#[test]
fn texts_have_a_limit() {
    let half = txt(&"a".repeat(TEXT_LIMIT / 2));
    let whole = two(BinaryOperator::Concatenate, half.clone(), half);
    assert_eq!(call(Function::Length, slice::from_ref(&whole)), int(TEXT_LIMIT as i64));
    assert_eq!(two(BinaryOperator::Concatenate, whole.clone(), txt("a")), NULL);
    assert_eq!(call(Function::Replace, &[whole.clone(), txt("a"), whole]), NULL);
    assert_eq!(two(BinaryOperator::Concatenate, txt("a"), txt("b")), txt("ab"));
}
