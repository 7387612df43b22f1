//! Every refusal of the crossing: the requester gets an error, and no level below is called.

mod support;

use std::io;
use std::sync::Arc;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, Clock, Disk,
    DiskOptions, ErrorKind, Geometry, Operation, REQUEST_LENGTH_MAX, Request,
};
use fathom_reactor::Reactor;

use support::{CAPACITY, Plan, Record, Recorder};

#[test]
fn the_crossing_refuses_requests_that_contradict_themselves() {
    let mut bench = Plan { alignment: 512, ..Plan::default() }.open();
    let range = |operation, offset, length: u64| {
        move |request: &mut Request| {
            request.operation = operation;
            request.offset = offset;
            request.length = length;
            if operation.carries_data() {
                request.buffers.allocate(length.min(1 << 26) as usize);
            }
        }
    };
    for operation in Operation::ALL {
        if !operation.has_range() {
            bench.refused(ErrorKind::Malformed, range(operation, 512, 0));
            bench.refused(ErrorKind::Malformed, range(operation, 0, 512));
            continue;
        }
        bench.refused(ErrorKind::OutOfRange, range(operation, CAPACITY, 512));
        bench.refused(ErrorKind::OutOfRange, range(operation, CAPACITY - 512, 1024));
        bench.refused(ErrorKind::OutOfRange, range(operation, u64::MAX - 511, 1024));
        bench.refused(ErrorKind::Malformed, range(operation, 0, 0));
        bench.refused(ErrorKind::Misaligned, range(operation, 1, 512));
        bench.refused(ErrorKind::Misaligned, range(operation, 512, 513));
        if operation.carries_data() {
            bench.refused(ErrorKind::Malformed, |request| {
                range(operation, 0, 1024)(request);
                request.buffers.truncate(512);
            });
            bench.refused(ErrorKind::Malformed, |request| {
                range(operation, 0, 1024)(request);
                request.buffers.clear();
            });
        }
    }
    // A request at the very end is within the disk.
    bench.submit(Operation::Read, CAPACITY - 512, 512);
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn the_crossing_refuses_requests_that_are_too_long() {
    struct Large(Recorder);
    impl Backend for Large {
        fn name(&self) -> &'static str {
            "large"
        }
        fn capacity(&self) -> u64 {
            REQUEST_LENGTH_MAX * 4
        }
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }
        fn open_queue(
            &self,
            context: &mut BackendOpenContext<'_>,
        ) -> io::Result<Box<dyn BackendQueue>> {
            self.0.open_queue(context)
        }
        fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
            Err(ErrorKind::Unsupported)
        }
        fn problems(&self) -> Vec<BackendProblem> {
            self.0.problems()
        }
        fn losses(&self) -> u64 {
            self.0.losses()
        }
        fn inspect(&self) {
            self.0.inspect();
        }
        fn recover(&self) -> io::Result<()> {
            self.0.recover()
        }
    }
    let record = Record::default();
    let capabilities = Capabilities::ALL;
    let recorder = Recorder { record: record.clone(), capabilities, alignment: 1, later: false };
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::new(Large(recorder))).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    for (operation, expected) in [
        (Operation::Read, Err(ErrorKind::TooLong)),
        (Operation::Write, Err(ErrorKind::TooLong)),
        // Without data the only limit is the disk's size.
        (Operation::Discard, Ok(())),
        (Operation::WriteZeroes, Ok(())),
        (Operation::Extents, Ok(())),
    ] {
        let mut request = stack.request();
        request.operation = operation;
        request.length = REQUEST_LENGTH_MAX + 1;
        if operation.carries_data() {
            request.buffers.allocate(request.length as usize);
        }
        stack.submit(request, &mut reactor);
        let (request, outcome) = stack.completed().unwrap();
        assert_eq!(outcome, expected, "{operation}");
        assert_eq!(record.take().len(), usize::from(expected.is_ok()));
        stack.recycle(request);
    }
}

#[test]
fn the_crossing_refuses_operations_that_the_disk_does_not_offer() {
    let nothing = Capabilities {
        flush: false,
        force_unit_access: false,
        discard: false,
        write_zeroes: false,
        ..Capabilities::ALL
    };
    let mut bench = Plan { capabilities: nothing, ..Plan::default() }.open();
    let ask = |operation: Operation, force_unit_access: bool| {
        move |request: &mut Request| {
            request.operation = operation;
            request.flags.force_unit_access = force_unit_access;
            request.length = if operation.has_range() { 512 } else { 0 };
            if operation.carries_data() {
                request.buffers.allocate(512);
            }
        }
    };
    bench.refused(ErrorKind::Unsupported, ask(Operation::Flush, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::Discard, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::WriteZeroes, false));
    bench.refused(ErrorKind::Unsupported, ask(Operation::Write, true));
    let mut bench = Plan { read_only: true, ..Plan::default() }.open();
    for operation in [Operation::Write, Operation::Discard, Operation::WriteZeroes] {
        bench.refused(ErrorKind::ReadOnly, ask(operation, false));
    }
    assert!(!bench.stack.capabilities().write);
    bench.submit(Operation::Read, 0, 512);
    assert_eq!(bench.outcome(), Some(Ok(())));
}

#[test]
fn a_capability_holds_from_the_layer_that_gives_it_upward() {
    // B removes the capability: A and the front end do not see it; C and the back end have it.
    let below_layer = |below| Capabilities { discard: false, ..below };
    let mut bench = Plan { below_layer, ..Plan::default() }.open();
    assert!(!bench.stack.capabilities().discard);
    bench.submit(Operation::Discard, 0, 512);
    assert_eq!(bench.outcome(), Some(Err(ErrorKind::Unsupported)));
    assert!(bench.record.take().is_empty());
}
