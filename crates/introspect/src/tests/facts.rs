//! The facts about each kind of request are exact.

use crate::synthetic::{MutationSubject, Shape};

fn answers(shape: &Shape) {
    let subject = MutationSubject::new(shape);
    for (request, reported) in subject.clean() {
        assert_eq!(reported, request.truth, "{}", request.name);
    }
}

#[test]
fn early_kernels() {
    answers(&Shape::default());
}

#[test]
fn recent_kernels() {
    answers(&Shape::recent());
}

#[test]
fn kernels_from_seven_on() {
    answers(&Shape::seven());
}
