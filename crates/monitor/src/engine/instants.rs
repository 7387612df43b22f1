//! Operators that see one instant after the other.

use differential_dataflow::{AsCollection, VecCollection};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::Scope;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::operator::Operator;

use super::agenda::{Agenda, Change};

/// Where an operator puts what changes: data, and how often more or less it is there.
pub(super) type Changes<E> = Vec<Change<E>>;

/// An operator that is called for each instant at which its input changes, in order of time, with
/// all the net changes of that instant. What it puts out changes at the same instant.
pub(super) fn by_instant<G, D, E, L>(
    input: &VecCollection<G, D, isize>,
    name: &str,
    mut logic: L,
) -> VecCollection<G, E, isize>
where
    G: Scope<Timestamp = u64>,
    D: Ord + Clone + 'static,
    E: Clone + 'static,
    L: FnMut(u64, &mut Changes<D>, &mut Changes<E>) + 'static,
{
    let mut agenda = Agenda::new();
    let mut capability: Option<Capability<u64>> = None;
    let (mut changes, mut results) = (Vec::new(), Vec::new());
    let stream =
        input.inner.unary_frontier::<CapacityContainerBuilder<Vec<(E, u64, isize)>>, _, _, _>(
            Pipeline,
            name,
            move |_, _| {
                move |(input, frontier), output| {
                    input.for_each(|time, data| {
                        if capability.as_ref().is_none_or(|held| time.time() < held.time()) {
                            capability = Some(time.retain());
                        }
                        for (data, time, difference) in data.drain(..) {
                            agenda.add(time, data, difference);
                        }
                    });
                    while let Some(time) = agenda.next().filter(|time| !frontier.less_equal(time)) {
                        agenda.take(time, &mut changes);
                        if changes.is_empty() {
                            continue;
                        }
                        results.clear();
                        logic(time, &mut changes, &mut results);
                        if let (Some(capability), false) = (&capability, results.is_empty()) {
                            let mut session = output.session(capability);
                            for (data, difference) in results.drain(..) {
                                session.give((data, time, difference));
                            }
                        }
                    }
                    match (agenda.next(), &mut capability) {
                        (Some(time), Some(capability)) => capability.downgrade(&time),
                        _ => capability = None,
                    }
                }
            },
        );
    stream.as_collection()
}
