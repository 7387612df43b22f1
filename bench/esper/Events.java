import java.io.FileInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;

/** Reads the events of a CSV file with known columns, as numbers and shared texts. */
final class Events implements AutoCloseable {
    private static final int COLUMNS = 10;
    private static final int PLACES = 1 << 10;

    private final FileInputStream input;
    private final boolean[] selected;
    private final byte[] buffer = new byte[256 << 10];
    private int at, end;
    // The last texts, each at the index given by its hash.
    private final String[] texts = new String[PLACES];
    private final byte[][] bytes = new byte[PLACES][];

    /** @param selected the columns to read, by number; the first is always read */
    Events(String path, boolean[] selected) throws IOException {
        this.selected = selected;
        input = new FileInputStream(path);
        if (fill()) {
            while (buffer[at++] != '\n') { }
        }
    }

    /** Makes room in the buffer for a whole line and fills it. Returns whether there are more bytes. */
    private boolean fill() throws IOException {
        System.arraycopy(buffer, at, buffer, 0, end - at);
        end -= at;
        at = 0;
        int read;
        while (end < buffer.length && (read = input.read(buffer, end, buffer.length - end)) > 0) {
            end += read;
        }
        return end > 0;
    }

    /** The next event, or null at the end. Lines are shorter than a KiB. */
    IoEvent next() throws IOException {
        if (end - at < 1024 && !fill()) {
            return null;
        }
        IoEvent event = new IoEvent();
        event.time = number();
        for (int column = 1; column < COLUMNS; column++) {
            if (!selected[column]) {
                byte last = column == COLUMNS - 1 ? (byte) '\n' : (byte) ',';
                while (buffer[at++] != last) { }
                continue;
            }
            switch (column) {
                case 1: event.type = text(); break;
                case 2: event.operation = text(); break;
                case 3: event.request = number(); break;
                case 4: event.sector = number(); break;
                case 5: event.size = number(); break;
                case 6: event.machine = text(); break;
                case 7: event.disk = text(); break;
                case 8: event.physicalDisk = text(); break;
                default: event.filterTime = number();
            }
        }
        return event;
    }

    private long number() {
        long value = 0;
        byte digit;
        while ((digit = buffer[at++]) >= '0') {
            value = value * 10 + (digit - '0');
        }
        return value;
    }

    private String text() {
        int start = at;
        int hash = 0;
        byte letter;
        while ((letter = buffer[at++]) != ',' && letter != '\n') {
            hash = hash * 31 + letter;
        }
        int length = at - 1 - start;
        int place = (hash ^ hash >>> 16) & PLACES - 1;
        byte[] known = bytes[place];
        if (known != null && known.length == length
                && java.util.Arrays.equals(known, 0, length, buffer, start, start + length)) {
            return texts[place];
        }
        bytes[place] = java.util.Arrays.copyOfRange(buffer, start, start + length);
        texts[place] = new String(bytes[place], StandardCharsets.UTF_8);
        return texts[place];
    }

    @Override
    public void close() throws IOException {
        input.close();
    }
}
