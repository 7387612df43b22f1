//! Exports recorded events in other formats.
use std::{
    io::{self, BufWriter},
    path::Path,
    sync::atomic::Ordering,
};

use fathom_monitor::{
    ResultSink,
    read::{self, Batch, Reader},
    recording::{Header, ParquetWriter, RowGroupLimits},
    write::{Form, Printer, PrinterOptions},
};

use super::{Broken, FileForm, RecordOptions, output::Output};
use crate::{failure::CommandResult, process::catch_signals, query::report_input};

/// Writes the events of a file in another format.
pub fn export(options: &RecordOptions, file: &Path, form: FileForm) -> CommandResult {
    let stream = match &options.streams[..] {
        [] => None,
        _ => Some(options.stream_names(form)?[0]),
    };
    let (mut reader, header) = read::open_whole(file, stream, &options.times.options(false))?;
    let mut output = Output::create(&options.output, form == FileForm::Parquet, options.force)?;
    let written = match form {
        FileForm::Parquet => parquet(&mut *reader, &header, &mut output),
        FileForm::Jsonl => print(&mut *reader, &header, &mut output, Form::Json),
        FileForm::Recording | FileForm::Csv => print(&mut *reader, &header, &mut output, Form::Csv),
    };
    report_input(reader.report());
    match written {
        Ok(()) => output.keep(),
        // A broken pipe is no failure.
        Err(Broken::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(broken) => Err(broken.into()),
    }
}

fn print(
    reader: &mut dyn Reader,
    header: &Header,
    output: &mut Output,
    form: Form,
) -> Result<(), Broken> {
    let out = BufWriter::with_capacity(1 << 18, output.writer());
    let mut printer = Printer::new(out, PrinterOptions { form, deltas: false });
    super::text::show_times(&mut printer, header, form);
    let mut batch = Batch::default();
    let mut print = || -> Result<(), Broken> {
        printer.begin(0, &header.streams[0].schema().columns, true)?;
        while reader.next_batch(&mut batch)? {
            for (time_ns, row) in batch.times_ns.iter().zip(batch.rows()) {
                printer.delta(0, *time_ns, 1, &row)?;
            }
        }
        Ok(())
    };
    let printed = print();
    printed.and(printer.finish().map(drop).map_err(Broken::Write))
}

fn parquet(reader: &mut dyn Reader, header: &Header, output: &mut Output) -> Result<(), Broken> {
    // The first signal removes the incomplete file; the second ends the process at once.
    let signalled = catch_signals(true)?;
    let mut writer = ParquetWriter::new(output.writer(), header, RowGroupLimits::default())?;
    let mut batch = Batch::default();
    loop {
        let more = reader.next_batch(&mut batch)?;
        if signalled.load(Ordering::Relaxed) {
            return Err(Broken::Interrupted);
        }
        if !more {
            break;
        }
        writer.append(&batch)?;
    }
    writer.finish(reader.report())?;
    Ok(())
}
