import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.*;

/** Chat, stream and upload by the JDK's HttpClient as it comes. Arguments: base URL, model, a sound file. */
public class Talk {
    public static void main(String[] args) throws Exception {
        var client = HttpClient.newHttpClient();
        var chat = "{\"model\":\"" + args[1] + "\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s}";
        for (var extra : new String[] {"", ",\"stream\":true"}) {
            var request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json").POST(BodyPublishers.ofString(chat.formatted(extra))).build();
            var response = client.send(request, BodyHandlers.ofString());
            System.out.println(response.version() + " " + response.statusCode() + " " + response.body().replace("\n", " "));
        }
        var start = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--b\r\n"
            + "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
        var body = BodyPublishers.concat(BodyPublishers.ofString(start), BodyPublishers.ofFile(Path.of(args[2])),
            BodyPublishers.ofString("\r\n--b--\r\n"));
        var upload = HttpRequest.newBuilder(URI.create(args[0] + "/v1/audio/transcriptions"))
            .header("Content-Type", "multipart/form-data; boundary=b").POST(body).build();
        var response = client.send(upload, BodyHandlers.ofString());
        System.out.println(response.version() + " " + response.statusCode() + " " + response.body());
    }
}
