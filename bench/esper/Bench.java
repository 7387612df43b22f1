import com.espertech.esper.common.client.EPCompiled;
import com.espertech.esper.common.client.EventBean;
import com.espertech.esper.common.client.EventSender;
import com.espertech.esper.common.client.configuration.Configuration;
import com.espertech.esper.common.client.util.EventUnderlyingType;
import com.espertech.esper.common.client.util.PropertyResolutionStyle;
import com.espertech.esper.compiler.client.CompilerArguments;
import com.espertech.esper.compiler.client.EPCompilerProvider;
import com.espertech.esper.runtime.client.EPDeployment;
import com.espertech.esper.runtime.client.EPRuntime;
import com.espertech.esper.runtime.client.EPRuntimeProvider;
import com.espertech.esper.runtime.client.EPStatement;
import com.espertech.esper.runtime.client.UpdateListener;
import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.concurrent.TimeUnit;

/**
 * Measures the cost of a query with Esper over a file, from its bytes to rows that are counted and
 * hashed: {@code Bench FILE PASSES COLUMNS EPL}. COLUMNS are the numbers of the events' columns,
 * separated by commas. Prints a line of JSON for each pass over the file. The first passes are
 * slower, because the code is compiled during them.
 */
public final class Bench implements UpdateListener {
    private static final long FACTOR = 0x9e3779b97f4a7c15L;

    private long time, come, go, hash;

    private static long hash(Object value) {
        if (value instanceof Long) {
            return (Long) value;
        }
        if (value instanceof String) {
            return ((String) value).hashCode();
        }
        return value == null ? 0 : Double.doubleToRawLongBits((Double) value);
    }

    private static long fold(long all, long value) {
        return (Long.rotateLeft(all, 5) ^ value) * FACTOR;
    }

    private long row(EventBean row) {
        Object underlying = row.getUnderlying();
        long all = time;
        if (underlying instanceof Object[]) {
            for (Object value : (Object[]) underlying) {
                all = fold(all, hash(value));
            }
            return all;
        }
        IoEvent event = (IoEvent) underlying;
        all = fold(all, event.time);
        all = fold(all, event.type.hashCode());
        all = fold(all, event.operation.hashCode());
        all = fold(all, event.request);
        all = fold(all, event.sector);
        all = fold(all, event.size);
        all = fold(all, event.machine.hashCode());
        all = fold(all, event.disk.hashCode());
        all = fold(all, event.physicalDisk.hashCode());
        return fold(all, event.filterTime);
    }

    /** Whether it is the row of an empty group, whose aggregates are null. */
    private static boolean isEmpty(EventBean row) {
        if (row.getUnderlying() instanceof Object[]) {
            for (Object value : (Object[]) row.getUnderlying()) {
                if (value == null) {
                    return true;
                }
            }
        }
        return false;
    }

    @Override
    public void update(EventBean[] comes, EventBean[] goes, EPStatement statement, EPRuntime runtime) {
        if (comes != null) {
            come += comes.length;
            for (EventBean row : comes) {
                hash += row(row);
            }
        }
        if (goes != null) {
            for (EventBean row : goes) {
                if (!isEmpty(row)) {
                    go++;
                    hash -= row(row);
                }
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        String path = arguments[0];
        int passes = Integer.parseInt(arguments[1]);
        boolean[] selected = new boolean[10];
        for (String column : arguments[2].split(",")) {
            selected[Integer.parseInt(column)] = true;
        }
        // One thread, time from the events, and no features for several threads.
        Configuration configuration = new Configuration();
        configuration.getCommon().addEventType("IOstream", IoEvent.class);
        configuration.getCommon().getTimeSource().setTimeUnit(TimeUnit.MICROSECONDS);
        configuration.getCommon().getEventMeta()
            .setDefaultEventRepresentation(EventUnderlyingType.OBJECTARRAY);
        configuration.getCommon().getEventMeta()
            .setClassPropertyResolutionStyle(PropertyResolutionStyle.CASE_INSENSITIVE);
        configuration.getRuntime().getThreading().setInternalTimerEnabled(false);
        configuration.getRuntime().getThreading().setListenerDispatchPreserveOrder(false);
        configuration.getRuntime().getThreading().setInsertIntoDispatchPreserveOrder(false);
        configuration.getRuntime().getExecution().setDisableLocking(true);
        EPCompiled compiled = EPCompilerProvider.getCompiler()
            .compile(arguments[3], new CompilerArguments(configuration));
        EPRuntime runtime = EPRuntimeProvider.getDefaultRuntime(configuration);
        // The CPU time includes all threads: also the collector's and the compiler's.
        OperatingSystemMXBean process =
            (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        for (int pass = 0; pass < passes; pass++) {
            EPDeployment deployment = runtime.getDeploymentService().deploy(compiled);
            Bench bench = new Bench();
            deployment.getStatements()[0].addListener(bench);
            EventSender sender = runtime.getEventService().getEventSender("IOstream");
            System.gc();
            long begun = System.nanoTime();
            long worked = process.getProcessCpuTime();
            long events = 0;
            try (Events input = new Events(path, selected)) {
                for (IoEvent event; (event = input.next()) != null; events++) {
                    bench.time = event.time;
                    sender.sendEvent(event);
                }
            }
            double seconds = (System.nanoTime() - begun) / 1e9;
            double cpu = (process.getProcessCpuTime() - worked) / 1e9;
            System.out.printf(
                "{\"events\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f, "
                    + "\"come\": %d, \"go\": %d, \"hash\": \"%016x\"}%n",
                events, seconds, cpu, bench.come, bench.go, bench.hash);
            System.out.flush();
            runtime.getDeploymentService().undeploy(deployment.getDeploymentId());
        }
        runtime.destroy();
    }
}
