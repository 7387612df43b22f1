//! What a store does, and the steps from one phase to the next.

use std::fmt;

/// What a store does with changes. Each kind of store has its own phases; a page in `docs/` has
/// them as a table. In builds for tests, a step that the table does not have ends the program, so
/// that no path leaves a failed store by itself.
pub trait Phase: Copy + PartialEq + fmt::Debug {
    /// Whether there is a step from this phase to `next`.
    fn leads_to(self, next: Self) -> bool;

    /// Goes on to `next`, or stays.
    fn step(&mut self, next: Self) {
        debug_assert!(*self == next || self.leads_to(next), "a step from {self:?} to {next:?}");
        *self = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Door {
        Open,
        Shut,
        Walled,
    }

    impl Phase for Door {
        fn leads_to(self, next: Self) -> bool {
            use Door::{Open, Shut, Walled};
            matches!((self, next), (Open, Shut) | (Shut, Open | Walled))
        }
    }

    #[test]
    fn only_the_steps_of_the_table_are_taken() {
        let mut door = Door::Open;
        for next in [Door::Shut, Door::Shut, Door::Open, Door::Shut, Door::Walled] {
            door.step(next);
            assert_eq!(door, next);
        }
        let result = std::panic::catch_unwind(|| Door::Walled.clone().step(Door::Open));
        assert_eq!(result.is_err(), cfg!(debug_assertions));
    }
}
