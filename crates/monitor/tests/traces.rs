//! Traces in the formats of other programs.

mod support;

use fathom_monitor::read::{ReadOptions, trace_formats};
use support::{Everything, all, bytes, bytes_with};

/// Reads a trace, and checks the columns that all formats have.
fn requests(file: impl AsRef<[u8]>, operations: &str) -> Everything {
    let read = bytes(file).unwrap();
    assert_eq!(read.report.bad, 0, "{:?}", read.report);
    assert_eq!(read.texts("Type").concat(), "Q".repeat(operations.len()));
    assert_eq!(read.texts("IOOp").concat(), operations);
    assert_eq!(read.integers("ReqId"), (0..operations.len() as i64).collect::<Vec<_>>());
    read
}

/// A record of oracleGeneral.
fn access(time_s: u32, object: u64, size: u32, next: i64) -> Vec<u8> {
    let mut record = time_s.to_le_bytes().to_vec();
    record.extend(object.to_le_bytes());
    record.extend(size.to_le_bytes());
    record.extend(next.to_le_bytes());
    record
}

#[test]
fn accesses_of_libcachesim() {
    let records = [
        access(5_633_898, 42_932_745, 512, 3),
        access(5_633_898, 40_409_911, 6656, -1),
        access(5_633_899, 42_932_745, 4097, i64::MAX),
    ];
    let read = requests(records.concat(), "rrr");
    let second = 1_000_000_000;
    assert_eq!(read.events.times_ns[1..], [5_633_898 * second, 5_633_899 * second]);
    assert_eq!(read.integers("Sector"), [42_932_745, 40_409_911, 42_932_745]);
    assert_eq!(read.integers("Size"), [1, 13, 9]);
    assert_eq!(read.texts("VDisk"), [""; 3]);
    // The first line of a text could be in the bytes of a record.
    let with_line = [access(10, 0x0a0a_0a0a, 512, 2), access(11, 0x0a0a_0a0a, 512, -1)];
    requests(with_line.concat(), "rr");
    // A file of one record, and one that is cut off.
    requests(access(0, 0, 0, -1), "r");
    let mut cut = records.concat();
    cut.pop();
    let read = bytes(cut).unwrap();
    assert_eq!((read.events.len(), read.report.bad), (2, 1));
    // An object that is no sector is reported, and a next access in the past is another format.
    let hashed = [records.concat(), access(5_633_899, u64::MAX, 1, -1)].concat();
    assert_eq!(bytes(hashed).unwrap().report.bad, 1);
    for wrong in [access(7, 1, 512, 0), access(7, 1, 512, 1 << 50)] {
        assert!(bytes(&wrong).is_err_and(|error| error.to_string().contains("is unknown")));
    }
    let back = [access(7, 1, 512, -1), access(6, 1, 512, -1)].concat();
    assert!(bytes(back).is_err(), "its times decrease");
}

#[test]
fn traces_of_msr_cambridge() {
    let read = requests(
        "128166372003061629,usr,0,Read,7014609920,24576,41286\n\
         128166372016382155,usr,0,Write,1317441537,1,1963\n",
        "rw",
    );
    assert_eq!(read.events.times_ns, [1_172_163_600_306_162_900, 1_172_163_601_638_215_500]);
    assert_eq!(read.integers("Sector"), [13_700_410, 2_573_128]);
    assert_eq!(read.integers("Size"), [48, 1]);
    assert_eq!(read.texts("VDisk"), ["usr_0"; 2]);
    let read = bytes(
        "128166372003061629,usr,0,Read,0,512,1\n\
         128166372003061629,usr,0,Erase,0,512,1\n\
         1,usr,0,Read,0,512,1\n\
         9223372036854775807,usr,0,Read,0,512,1\n\
         128166372003061629,usr,0,Read,9223372036854775807,512,1\n\
         128166372003061629,usr,0,Read,0,512\n",
    );
    let report = read.unwrap().report;
    assert_eq!((report.events, report.bad), (1, 5), "{report:?}");
}

#[test]
fn traces_of_the_storage_performance_council() {
    let read = requests(
        "0,20941264,8192,W,0.551706,ALPHA,BETA\n0,20939840,513,w,0.554041\n 1 , 3436288 , 15872 , R , 1 \n",
        "wwr",
    );
    assert_eq!(read.events.times_ns, [551_706_000, 554_041_000, 1_000_000_000]);
    assert_eq!(read.integers("Sector"), [20_941_264, 20_939_840, 3_436_288]);
    assert_eq!(read.integers("Size"), [16, 2, 31]);
    assert_eq!(read.texts("VDisk"), ["0", "0", "1"]);
    let report =
        bytes("0,1,512,R,0\n0,1,512,X,0\n0,1,512,R,-1\n0,1,512,R,1.x\n0,1,512,R\n").unwrap().report;
    assert_eq!((report.events, report.bad), (1, 4), "{report:?}");
}

#[test]
fn traces_of_arc() {
    let read = requests("2029 64 0 0\n2093 8 0 1\r\n2029 1 0 2\n", "rrr");
    assert_eq!(read.events.times_ns, [0, 1000, 2000], "a request in each microsecond");
    assert_eq!(read.integers("Sector"), [2029, 2093, 2029]);
    assert_eq!(read.integers("Size"), [64, 8, 1]);
}

#[test]
fn traces_of_disksim() {
    let read = requests("0.000000 0 46712824 16 1\n0.5 0 34 8 0\n1234.567891 2 1 2 0x15\n", "rwr");
    assert_eq!(read.events.times_ns, [0, 500_000, 1_234_567_891]);
    assert_eq!(read.integers("Sector"), [46_712_824, 34, 1]);
    assert_eq!(read.integers("Size"), [16, 8, 2]);
    assert_eq!(read.texts("VDisk"), ["0", "0", "2"]);
    // The first time may be without a fraction, if that of a line near it is not.
    assert_eq!(requests("7 0 1 8 0\n7.5 0 1 8 0\n", "ww").events.times_ns, [7_000_000, 7_500_000]);
}

#[test]
fn traces_of_mqsim() {
    let read = requests("4851300 1 524288 16 0\n4864300\t1\t524304 16 1\n", "wr");
    assert_eq!(read.events.times_ns, [4_851_300, 4_864_300]);
    assert_eq!(read.integers("Sector"), [524_288, 524_304]);
    assert_eq!(read.integers("Size"), [16; 2]);
    assert_eq!(read.texts("VDisk"), ["1"; 2]);
    assert_eq!(bytes("1 1 1 1 1\n2 1 1 1 2\n").unwrap().report.bad, 1);
}

#[test]
fn logs_of_fio() {
    let read = requests(
        "fio version 3 iolog\n0 /dev/vda add\n25 /dev/vda open\n310 /dev/vda read 8192 4096\n\
         320 /dev/vda write 100 4096\n331 /dev/vda sync 0 0\n332 /dev/vda datasync 0 0\n\
         340 /dev/vda trim 1048576 65536\n400 /dev/vda close\n",
        "rwffd",
    );
    assert_eq!(read.events.times_ns, [310_000, 320_000, 331_000, 332_000, 340_000]);
    assert_eq!(read.integers("Sector"), [16, 0, 0, 0, 2048]);
    assert_eq!(read.integers("Size"), [8, 9, 0, 0, 128]);
    assert_eq!(read.texts("VDisk"), ["/dev/vda"; 5]);
    let read = requests(
        "fio version 2 iolog\n/tmp/a add\n/tmp/a open\n/tmp/a read 0 512\n/tmp/a wait 150 0\n\
         /tmp/a write 512 512\n/tmp/a wait 50 0\n/tmp/a write 1024 512\n",
        "rww",
    );
    assert_eq!(read.events.times_ns, [0, 150_000, 200_000]);
    let wrong = "fio version 3 iolog\n1 f read 0 512\n2 f wait 5 0\n3 f erase 0 512\n4 f read 0\n\
                 5 f read 9223372036854775807 512\nx f read 0 512\n6 f read 0 512 7\n";
    let report = bytes(wrong).unwrap().report;
    assert_eq!((report.events, report.bad), (1, 6), "{report:?}");
    // No times after the last instant of events, and no loss of rows.
    let waits = "f wait 2305843009213693 0\n".repeat(9);
    let read = bytes(format!("fio version 2 iolog\n{waits}f read 0 512\n")).unwrap();
    assert_eq!((read.events.len(), read.report.bad), (1, 0));
}

#[test]
fn a_name_of_a_disk_is_bounded_and_batches_have_an_end() {
    let long = format!("fio version 3 iolog\n1 f read 0 512\n2 {} read 0 512\n", "x".repeat(9000));
    assert_eq!(bytes(long).unwrap().report.bad, 1);
    let lines: Vec<String> = (0..10_000).map(|at| format!("{at} 0 {at} 8 1\n")).collect();
    let mut wanted = all();
    wanted.fill(false);
    let read = bytes_with(lines.concat(), &wanted, &ReadOptions::default()).unwrap();
    assert_eq!((read.events.len(), read.events.columns.len()), (10_000, 0));
}

#[test]
fn the_page_and_the_message_have_all_formats() {
    let page = include_str!("../../../docs/commands.md");
    let message = bytes("Dear all,\n").unwrap_err();
    let help = message.help().unwrap();
    for name in trace_formats() {
        assert!(page.contains(&format!("| {name} |")), "docs/commands.md lacks {name}");
        assert!(help.contains(name), "{help}");
    }
}
